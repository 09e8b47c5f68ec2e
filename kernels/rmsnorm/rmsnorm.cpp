#include "kernels/rmsnorm/rmsnorm.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/common/op_parts.hpp"

namespace fftune {
namespace rmsnorm {
namespace {

std::vector<TensorSpec> tensors_of(const Layer& layer) {
  const std::vector<std::int64_t> rows{layer.m, layer.d};
  const auto matrix = [&](const char* name, Role role) {
    return TensorSpec{name, layer.dtype, rows, role, 1};
  };
  // What w is multiplied with is of order one; in gemma's convention it is the distance from 1.
  TensorSpec w{"w", layer.weight_dtype, {layer.d}, Role::input, 1};
  if (layer.convention == Convention::gemma) w.scale = 0.25;
  TensorSpec rstd{"rstd", DType::f32, {layer.m}, Role::output, 0.125, 1};

  std::vector<TensorSpec> tensors{matrix("x", Role::input)};
  if (!layer.backward) {
    if (layer.adds || layer.adds_after) tensors.push_back(matrix("residual", Role::input));
    tensors.push_back(w);
    tensors.push_back({"y", layer.out_dtype, rows, Role::output, 1});
    if (layer.adds) tensors.push_back(matrix("sum", Role::output));
    if (layer.saves) tensors.push_back(rstd);
    if (layer.quantises()) tensors.push_back({"scale", DType::f32, {layer.m}, Role::output, 1});
    return tensors;
  }
  tensors.push_back(w);
  tensors.push_back(matrix("dy", Role::input));
  if (layer.adds) tensors.push_back(matrix("dsum", Role::input));
  rstd.role = Role::input;
  if (layer.saves) tensors.push_back(rstd);
  tensors.push_back(matrix("dx", Role::output));
  tensors.push_back({"dw", layer.weight_dtype, {layer.d}, Role::output, 1});
  tensors.back().sums_tokens = true;
  return tensors;
}

class RmsNorm final : public Op {
 public:
  std::string_view name() const override { return "rmsnorm"; }
  std::string_view summary() const override {
    return "root mean square normalisation: y = x / sqrt(mean(x^2) + eps) * w";
  }
  std::vector<std::string> passes() const override { return {"fwd", "bwd"}; }
  std::vector<SizeField> sizes() const override {
    return {row_tokens(),
            {.name = "d", .help = "features of a token", .max = most_features, .example = 4096}};
  }
  std::vector<OptionField> options() const override {
    return {{"convention",
             "where it rounds, and whether w is kept as its distance from 1",
             {"llama", "gemma", "t5"}},
            {"residual",
             "add a residual first, and write the sum too; after: add it to y",
             {"no", "yes", "after"}},
            {"save", "what the forward pass keeps for the backward pass", {"nothing", "rstd"}},
            {"weights", "element type of w and dw: the op's, or f32", {"same", "f32"}},
            {.name = "eps",
             .help = "added to the mean square",
             .choices = {"1e-06"},
             .number = NumberRange{0, 1}},
            {"output",
             "element type of y: the op's, or one quantised with a scale for each token",
             {"same", "fp8", "i8"},
             true}};
  }
  std::vector<DType> dtypes(DeviceKind kind) const override { return float_dtypes(kind); }
  std::string_view token_size() const override { return "m"; }
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
    StageSpec stage =
        whole_stage(layer.backward ? stage_backward : stage_forward, tensors_of(layer));
    // Behind dw are sums over tokens of what sums over features are behind.
    stage.reduction_length = layer.backward ? layer.d + layer.m : layer.d;
    const double elements = static_cast<double>(layer.m) * static_cast<double>(layer.d);
    stage.flops =
        elements * (layer.backward ? 12 : 4) + (layer.adds || layer.adds_after ? elements : 0);
    return {stage};
  }

  void reference(const Problem& problem, std::size_t, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    rmsnorm::reference(layer_of(problem), tensors, parallel);
  }

  std::vector<const Family*> families() const override {
    return joined({cuda_families(), cpu_families()});
  }
  std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) const override {
    return rmsnorm::baselines(problem, facts);
  }
};

}  // namespace

Layer layer_of(const Problem& problem) {
  Layer layer;
  layer.m = problem.size("m");
  layer.d = problem.size("d");
  layer.eps = static_cast<float>(problem.number("eps"));
  const auto& convention = problem.option("convention");
  layer.convention = convention == "gemma" ? Convention::gemma
                     : convention == "t5"  ? Convention::t5
                                           : Convention::llama;
  layer.backward = problem.pass == "bwd";
  layer.adds = problem.option("residual") == "yes";
  layer.adds_after = problem.option("residual") == "after";
  layer.saves = problem.option("save") == "rstd";
  layer.dtype = problem.dtype;
  layer.weight_dtype = problem.option("weights") == "f32" ? DType::f32 : problem.dtype;
  layer.out_dtype = problem.dtype;
  if (!layer.backward && problem.has("output", "fp8")) layer.out_dtype = DType::fp8;
  if (!layer.backward && problem.has("output", "i8")) layer.out_dtype = DType::i8;
  return layer;
}

TensorPlaces places_of(const Layer& layer) {
  return TensorPlaces(tensors_of(layer));
}

}  // namespace rmsnorm

const Op& rmsnorm_op() {
  static const rmsnorm::RmsNorm op;
  return op;
}

}  // namespace fftune
