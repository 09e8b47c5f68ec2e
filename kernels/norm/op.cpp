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
          batch_invariant_option(),
          frozen_option("the weights")};
}

std::vector<OptionField> layer_options() {
  return {{"residual", "add a residual first, and write the sum too", {"no", "yes"}},
          {.name = "eps",
           .help = "added to the variance",
           .choices = {"1e-05"},
           .number = NumberRange{0, 1}},
          frozen_option("w and b")};
}

constexpr std::string_view layernorm = "layernorm";

std::string contradiction(const Problem& problem) {
  const Layer layer = layer_of(problem);
  if (layer.adds_after && layer.backward)
    return "residual=after in pass bwd: its gradient is that of residual=no, and of the residual "
           "dy itself";
  if (layer.adds_after && layer.quantises())
    return "residual=after with output=" + problem.option("output") +
           ": a sum is of the op's element type";
  return "";
}

void complete_stage(const Problem& problem, StageSpec& stage) {
  const Layer layer = layer_of(problem);
  // An element of dw sums over tokens terms that are sums over features themselves.
  stage.reduction_length = layer.backward && !layer.frozen ? layer.d + layer.m : layer.d;
  const double of_element = layer.centres ? layer.backward ? 16 : 7 : layer.backward ? 12 : 4;
  stage.flops = static_cast<double>(layer.m) * static_cast<double>(layer.d) *
                (of_element + (layer.adds || layer.adds_after ? 1 : 0));
}

/// With what both ops have in common.
OpFacts completed(OpFacts facts) {
  facts.sizes = {
      row_tokens(),
      {.name = "d", .help = "features of a token", .max = most_features, .example = 4096}};
  facts.baselines = baselines;
  facts.contradiction = contradiction;
  facts.stage = {
      .tensors = [](const Problem& problem) { return tensors_of(layer_of(problem)); },
      .complete = complete_stage,
      .reference = [](const Problem& problem, ReferenceTensors& tensors,
                      Parallel& parallel) { reference(layer_of(problem), tensors, parallel); }};
  return facts;
}

OpFacts rms_facts() {
  return completed({.name = "rmsnorm",
                    .summary = "root mean square normalisation: y = x / sqrt(mean(x^2) + eps) * w",
                    .options = rms_options(),
                    .families = {row_families, fallback_families, cpu_families}});
}

OpFacts layer_facts() {
  return completed(
      {.name = layernorm,
       .summary = "layer normalisation: y = (x - mean(x)) / sqrt(var(x) + eps) * w + b",
       .options = layer_options(),
       .families = {centred_row_families, centred_fallback_families, cpu_families}});
}

}  // namespace

Layer layer_of(const Problem& problem) {
  auto layer = sizes_of<Layer>(problem, {{"m", &Layer::m}, {"d", &Layer::d}});
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
  layer.frozen = is_frozen(problem);
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
    if (layer.adds) tensors.back().may_alias = "sum";
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
  if (layer.frozen) return tensors;
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
  static const DescribedOp op(norm::rms_facts());
  return op;
}

const fftune::Op& fftune::layernorm_op() {
  static const DescribedOp op(norm::layer_facts());
  return op;
}
