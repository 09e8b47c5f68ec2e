#include "kernels/act_mul/act_mul.hpp"

#include <algorithm>
#include <utility>

#include "kernels/common/activation.hpp"

namespace fftune::act_mul {
namespace {

/// Activations whose out is not a mere product.
std::vector<std::string> gate_activations() {
  auto names = activation_names();
  std::erase(names, "none");
  return names;
}

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  const std::int64_t m = problem.size("m");
  const std::int64_t h = problem.size("h");
  const auto tensor = [&](const char* name, Role role, std::int64_t columns) {
    return TensorSpec{name, problem.dtype, {m, columns}, role, 1};
  };
  std::vector<TensorSpec> tensors;
  const auto add_gate_and_up = [&](const char* gate, const char* up, const char* both, Role role) {
    if (packed(problem)) {
      tensors.push_back(tensor(both, role, 2 * h));
    } else {
      tensors.push_back(tensor(gate, role, h));
      tensors.push_back(tensor(up, role, h));
    }
  };
  add_gate_and_up("gate", "up", "gate_up", Role::input);
  if (problem.pass == "fwd") {
    tensors.push_back(tensor("out", Role::output, h));
  } else {
    tensors.push_back(tensor("dout", Role::input, h));
    add_gate_and_up("dgate", "dup", "dgate_up", Role::output);
  }
  return tensors;
}

void complete_stage(const Problem& problem, StageSpec& stage) {
  const bool backward = problem.pass == "bwd";
  stage.flops = static_cast<double>(problem.size("m")) * static_cast<double>(problem.size("h")) *
                (backward ? 5 : 2);
}

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const auto act = parse_activation(problem.option("act"));
  const auto m = static_cast<std::size_t>(problem.size("m"));
  const auto h = static_cast<std::size_t>(problem.size("h"));
  const bool both = packed(problem);
  const bool backward = problem.pass == "bwd";
  // Where element (row, column) of gate and of up is, in the tensors and in their gradients.
  const std::size_t stride = both ? 2 * h : h;
  const std::size_t second = both ? h : 0;
  const auto& gate = tensors.at(both ? "gate_up" : "gate");
  const auto& up = tensors.at(both ? "gate_up" : "up");
  std::vector<double> out(backward ? 0 : m * h);
  std::vector<double> dgate(backward ? m * stride : 0);
  std::vector<double> dup(backward && !both ? m * h : 0);
  std::vector<double>& dup_home = both ? dgate : dup;
  const double* const dout = backward ? tensors.at("dout").data() : nullptr;
  parallel.run(static_cast<int>(m), parallel.max_threads(), [&](int task) {
    const auto row = static_cast<std::size_t>(task);
    for (std::size_t column = 0; column < h; ++column) {
      const std::size_t i = row * h + column;
      const std::size_t at = row * stride + column;
      const double g = gate[at];
      const double u = up[at + second];
      if (backward) {
        dgate[at] = activation_gradient(act, g, dout[i] * u);
        dup_home[at + second] = dout[i] * activate(act, g);
      } else {
        out[i] = activate(act, g) * u;
      }
    }
  });
  if (!backward) {
    tensors["out"] = std::move(out);
  } else {
    tensors[both ? "dgate_up" : "dgate"] = std::move(dgate);
    if (!both) tensors["dup"] = std::move(dup);
  }
}

OpFacts facts() {
  return {
      .name = "act-mul",
      .summary = "out = act(gate) * up",
      .sizes = {row_tokens(), {.name = "h", .help = "features of a token in out", .example = 4096}},
      .options = {{"act", "activation of the gate", gate_activations()},
                  {"packed",
                   "gate and up are the halves of each row of one tensor",
                   {"no", "yes"}}},
      .families = {cuda_families, cpu_families},
      .baselines = baselines,
      .stage = {.tensors = tensors_of, .complete = complete_stage, .reference = reference}};
}

}  // namespace

bool packed(const Problem& problem) {
  return problem.option("packed") == "yes";
}

std::string_view tensor_with(const Problem& problem, std::string_view part) {
  if (!packed(problem) || part == "out" || part == "dout") return part;
  return part.starts_with('d') ? "dgate_up" : "gate_up";
}

}  // namespace fftune::act_mul

const fftune::Op& fftune::act_mul_op() {
  static const DescribedOp op(act_mul::facts());
  return op;
}
