#include <string>
#include <vector>

#include "kernels/common/op_parts.hpp"
#include "kernels/norm/norm.hpp"

namespace fftune::norm {
namespace {

std::vector<OptionField> rms_options() {
  return {{"convention",
           "where it rounds, and whether w is kept as its distance from 1",
           {"llama", "gemma", "t5"}},
          {"residual",
           "add a residual first, and write the sum too; after: add it to y",
           {"no", "yes", "after"}},
          {"save", "kept by the forward pass for the backward pass", {"nothing", "rstd"}},
          {"weights", "element type of w and dw: the op's, or f32", {"same", "f32"}},
          {.name = "eps",
           .help = "added to the mean square",
           .choices = {"1e-06"},
           .number = NumberRange{0, 1}},
          {"output",
           "element type of y: the op's, or one quantised with a scale for each token",
           {"same", "fp8", "i8"},
           true},
          batch_invariant_option()};
}

std::vector<OptionField> layer_options() {
  return {{"residual", "add a residual first, and write the sum too", {"no", "yes"}},
          {.name = "eps",
           .help = "added to the variance",
           .choices = {"1e-05"},
           .number = NumberRange{0, 1}}};
}

constexpr std::string_view layernorm = "layernorm";

/// Operations of an element, without the residual.
struct ElementFlops {
  double forward = 0, backward = 0;
};

class Norm final : public DescribedOp {
 public:
  Norm(OpFacts facts, ElementFlops flops) : DescribedOp(std::move(facts)), flops_(flops) {}

  std::string contradiction(const Problem& problem) const override {
    const Layer layer = layer_of(problem);
    if (layer.adds_after && layer.backward)
      return "residual=after in pass bwd: its gradient is that of residual=no, and of the residual "
             "dy itself";
    if (layer.adds_after && layer.quantises())
      return "residual=after with output=" + problem.option("output") +
             ": a sum is of the op's element type";
    return "";
  }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return tensors_of(layer_of(problem));
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    const Layer layer = layer_of(problem);
    StageSpec stage = whole_stage(stage_of_pass(problem.pass), tensors_of(layer));
    // An element of dw sums over tokens terms that are sums over features themselves.
    stage.reduction_length = layer.backward ? layer.d + layer.m : layer.d;
    const double of_element = layer.backward ? flops_.backward : flops_.forward;
    stage.flops = static_cast<double>(layer.m) * static_cast<double>(layer.d) *
                  (of_element + (layer.adds || layer.adds_after ? 1 : 0));
    return {stage};
  }

  void reference(const Problem& problem, std::size_t, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    norm::reference(layer_of(problem), tensors, parallel);
  }

 private:
  ElementFlops flops_;
};

std::vector<SizeField> size_fields() {
  return {row_tokens(),
          {.name = "d", .help = "features of a token", .max = most_features, .example = 4096}};
}

}  // namespace

Layer layer_of(const Problem& problem) {
  Layer layer;
  layer.m = problem.size("m");
  layer.d = problem.size("d");
  layer.eps = static_cast<float>(problem.number("eps"));
  layer.centres = problem.op == layernorm;
  layer.convention = problem.has("convention", "gemma")   ? Convention::gemma
                     : problem.has("convention", "llama") ? Convention::llama
                                                          : Convention::t5;
  layer.backward = problem.pass == "bwd";
  layer.batch_invariant = is_batch_invariant(problem);
  layer.adds = problem.option("residual") == "yes";
  layer.adds_after = problem.option("residual") == "after";
  layer.saves = problem.has("save", "rstd");
  layer.dtype = problem.dtype;
  layer.weight_dtype = problem.has("weights", "f32") ? DType::f32 : problem.dtype;
  layer.out_dtype = problem.dtype;
  if (!layer.backward && problem.has("output", "fp8")) layer.out_dtype = DType::fp8;
  if (!layer.backward && problem.has("output", "i8")) layer.out_dtype = DType::i8;
  return layer;
}

std::vector<TensorSpec> tensors_of(const Layer& layer) {
  const auto matrix = [&](const char* name, Role role) {
    return TensorSpec{name, layer.dtype, {layer.m, layer.d}, role, 1};
  };
  const auto vector = [&](const char* name, Role role) {
    return TensorSpec{name, layer.weight_dtype, {layer.d}, role, 1};
  };
  const auto of_rows = [&](const char* name, Role role, double scale, double mean) {
    return TensorSpec{name, DType::f32, {layer.m}, role, scale, mean};
  };
  // The factor derived from w is of order one; in gemma's convention w is its distance from 1.
  TensorSpec w = vector("w", Role::input);
  if (layer.convention == Convention::gemma) w.scale = 0.25;

  std::vector<TensorSpec> tensors{matrix("x", Role::input)};
  if (!layer.backward) {
    if (layer.adds || layer.adds_after) tensors.push_back(matrix("residual", Role::input));
    tensors.push_back(w);
    if (layer.centres) tensors.push_back(vector("b", Role::input));
    tensors.push_back(matrix("y", Role::output));
    tensors.back().dtype = layer.out_dtype;
    if (layer.adds) tensors.push_back(matrix("sum", Role::output));
    if (layer.saves) tensors.push_back(of_rows("rstd", Role::output, 0.125, 1));
    if (layer.quantises()) tensors.push_back(of_rows("scale", Role::output, 1, 0));
    return tensors;
  }
  tensors.push_back(w);
  tensors.push_back(matrix("dy", Role::input));
  if (layer.adds) tensors.push_back(matrix("dsum", Role::input));
  if (layer.saves) tensors.push_back(of_rows("rstd", Role::input, 0.125, 1));
  tensors.push_back(matrix("dx", Role::output));
  for (const char* name : {"dw", "db"}) {
    if (!layer.centres && std::string(name) == "db") continue;
    tensors.push_back(vector(name, Role::output));
    tensors.back().sums_tokens = true;
  }
  return tensors;
}

TensorPlaces places_of(const Layer& layer) {
  return TensorPlaces(tensors_of(layer));
}

}  // namespace fftune::norm

const fftune::Op& fftune::rmsnorm_op() {
  static const norm::Norm op(
      {.name = "rmsnorm",
       .summary = "root mean square normalisation: y = x / sqrt(mean(x^2) + eps) * w",
       .sizes = norm::size_fields(),
       .options = norm::rms_options(),
       .families = {norm::row_families, norm::fallback_families, norm::cpu_families},
       .baselines = norm::baselines},
      {.forward = 4, .backward = 12});
  return op;
}

const fftune::Op& fftune::layernorm_op() {
  static const norm::Norm op(
      {.name = norm::layernorm,
       .summary = "layer normalisation: y = (x - mean(x)) / sqrt(var(x) + eps) * w + b",
       .sizes = norm::size_fields(),
       .options = norm::layer_options(),
       .families = {norm::centred_row_families, norm::centred_fallback_families,
                    norm::cpu_families},
       .baselines = norm::baselines},
      {.forward = 7, .backward = 16});
  return op;
}
