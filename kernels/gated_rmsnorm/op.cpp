// gated-rmsnorm: its fields and tensors.
#include <fmt/format.h>

#include <string>
#include <utility>

#include "core/saturated.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/gated_rmsnorm/gated_rmsnorm.hpp"

namespace fftune::gated_rmsnorm {
namespace {

constexpr std::int64_t most_stride = std::int64_t{1} << 34;

std::string contradiction(const Problem& problem) {
  const Layer layer = layer_of(problem);
  if (layer.z_row < layer.z_width())
    return fmt::format("z-row={} is less than groups{} = {}", layer.z_row,
                       layer.row_gate ? "" : " * d", layer.z_width());
  if (layer.normed) return "";
  if (layer.one_w) return "weights-for=token with norm=none: there are no weights";
  for (const auto& [name, value] : {std::pair{"order", "after"}, {"convention", "t5"}})
    if (!problem.has(name, value))
      return fmt::format("{}={} with norm=none: there is no norm", name, problem.option(name));
  return "";
}

void complete_stage(const Problem& problem, StageSpec& stage) {
  const Layer layer = layer_of(problem);
  stage.bytes -= static_cast<double>(layer.m) * static_cast<double>(layer.z_row - layer.z_width()) *
                 static_cast<double>(dtype_bytes(layer.dtype));
  // An element of dw sums over tokens terms that are sums over features themselves.
  stage.reduction_length = layer.backward && !layer.frozen ? layer.d + layer.m : layer.d;
  if (!layer.normed) stage.reduction_length = 1;
  stage.flops =
      static_cast<double>(layer.m) * static_cast<double>(layer.width()) * (layer.backward ? 20 : 7);
}

std::optional<std::int64_t> usual_z_row(const Problem& problem) {
  return saturated_product(size_or(problem, "groups", 1),
                           problem.has("gate-for", "norm") ? 1 : size_or(problem, "d", 0));
}

OpFacts facts() {
  return {
      .name = "gated-rmsnorm",
      .summary =
          "RMSNorm with a gate behind it or before it: y = rmsnorm(x) * act(z), or "
          "rmsnorm(x * act(z))",
      .sizes = {row_tokens(),
                {.name = "d", .help = "features of a norm", .max = most_features, .example = 128},
                rare_size("groups",
                          "norms of a token, each with its own part of w, or with "
                          "weights-for=token all with one",
                          1024, 8, usually(1)),
                rare_size("z-row",
                          "stride of z between tokens, in elements, for columns of a wider "
                          "tensor; groups * d if left out, or groups with gate-for=norm",
                          most_stride, 18560, usual_z_row)},
      .options = {{"order", "the gate comes after the norm, or before it", {"after", "before"}},
                  {"gate", "activation of z", {"silu", "sigmoid"}},
                  {"convention",
                   "t5 rounds once, at the end; llama rounds the normalised value too, and its "
                   "product with w",
                   {"t5", "llama"}},
                  {"weights", "element type of w and dw: the op's, or f32", {"same", "f32"}},
                  {.name = "eps",
                   .help = "added to the mean square",
                   .choices = {"1e-06"},
                   .number = NumberRange{0, 1}},
                  rare_option("norm", "RMSNorm, or none: the gate alone", {"rms", "none"}, "fwd"),
                  rare_option("gate-for",
                              "whether z has an element for each feature, or one for each norm",
                              {"feature", "norm"}, "fwd"),
                  rare_option("weights-for",
                              "whether each norm of a token has its own part of w, or all have one",
                              {"norm", "token"}, "fwd"),
                  frozen_option("the weights")},
      .families = {cuda_families, cpu_families},
      .contradiction = contradiction,
      .stage = {.tensors = [](const Problem& problem) { return tensors_of(layer_of(problem)); },
                .complete = complete_stage,
                .reference = reference}};
}

}  // namespace

Layer layer_of(const Problem& problem) {
  auto layer = sizes_of<Layer>(problem, {{"m", &Layer::m}, {"d", &Layer::d}});
  layer.groups = size_or(problem, "groups", 1);
  layer.normed = !problem.has("norm", "none");
  layer.row_gate = problem.has("gate-for", "norm");
  layer.one_w = problem.has("weights-for", "token");
  layer.z_row = size_or(problem, "z-row", layer.z_width());
  layer.eps = static_cast<float>(problem.number("eps"));
  layer.before = problem.has("order", "before");
  layer.sigmoid = problem.has("gate", "sigmoid");
  layer.rounds = problem.has("convention", "llama");
  layer.backward = problem.pass == "bwd";
  layer.frozen = is_frozen(problem);
  layer.dtype = problem.dtype;
  layer.weight_dtype = problem.has("weights", "f32") ? DType::f32 : problem.dtype;
  return layer;
}

std::vector<TensorSpec> tensors_of(const Layer& layer) {
  const auto matrix = [&](const char* name, Role role) {
    return TensorSpec{name, layer.dtype, {layer.m, layer.width()}, role, 1};
  };
  const TensorSpec w{"w", layer.weight_dtype, {layer.w_width()}, Role::input, 1};
  TensorSpec z = matrix("z", Role::input);
  z.shape.back() = layer.z_row;
  z.behind = layer.z_row - layer.z_width();
  if (!layer.normed) return {matrix("x", Role::input), z, matrix("y", Role::output)};
  if (!layer.backward) return {matrix("x", Role::input), z, w, matrix("y", Role::output)};
  std::vector<TensorSpec> tensors{matrix("dy", Role::input),  matrix("x", Role::input),  z, w,
                                  matrix("dx", Role::output), matrix("dz", Role::output)};
  if (!layer.frozen) {
    tensors.push_back({"dw", layer.weight_dtype, {layer.width()}, Role::output});
    tensors.back().sums_tokens = true;
  }
  return tensors;
}

}  // namespace fftune::gated_rmsnorm

const fftune::Op& fftune::gated_rmsnorm_op() {
  static const DescribedOp op(gated_rmsnorm::facts());
  return op;
}
