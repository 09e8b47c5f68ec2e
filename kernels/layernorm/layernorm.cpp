#include "kernels/layernorm/layernorm.hpp"

#include <string>
#include <vector>

namespace fftune {
namespace layernorm {
namespace {

std::vector<TensorSpec> tensors_of(const Layer& layer) {
  const std::vector<std::int64_t> rows{layer.m, layer.d};
  const auto matrix = [&](const char* name, Role role) {
    return TensorSpec{name, layer.dtype, rows, role, 1};
  };
  const auto vector = [&](const char* name, Role role) {
    return TensorSpec{name, layer.dtype, {layer.d}, role, 1};
  };
  std::vector<TensorSpec> tensors{matrix("x", Role::input)};
  if (!layer.backward) {
    if (layer.adds) tensors.push_back(matrix("residual", Role::input));
    tensors.push_back(vector("w", Role::input));
    tensors.push_back(vector("b", Role::input));
    tensors.push_back(matrix("y", Role::output));
    if (layer.adds) tensors.push_back(matrix("sum", Role::output));
    return tensors;
  }
  tensors.push_back(vector("w", Role::input));
  tensors.push_back(matrix("dy", Role::input));
  if (layer.adds) tensors.push_back(matrix("dsum", Role::input));
  tensors.push_back(matrix("dx", Role::output));
  for (const char* name : {"dw", "db"}) {
    tensors.push_back(vector(name, Role::output));
    tensors.back().sums_tokens = true;
  }
  return tensors;
}

class LayerNorm final : public Op {
 public:
  std::string_view name() const override { return "layernorm"; }
  std::string_view summary() const override {
    return "layer normalisation: y = (x - mean(x)) / sqrt(var(x) + eps) * w + b";
  }
  std::vector<std::string> passes() const override { return {"fwd", "bwd"}; }
  std::vector<SizeField> sizes() const override {
    return {row_tokens(),
            {.name = "d", .help = "features of a token", .max = most_features, .example = 4096}};
  }
  std::vector<OptionField> options() const override {
    return {{"residual", "add a residual first, and write the sum too", {"no", "yes"}},
            {.name = "eps",
             .help = "added to the variance",
             .choices = {"1e-05"},
             .number = NumberRange{0, 1}}};
  }
  std::vector<DType> dtypes(DeviceKind kind) const override { return float_dtypes(kind); }
  std::string_view token_size() const override { return "m"; }

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
    stage.flops = elements * (layer.backward ? 16 : 7) + (layer.adds ? elements : 0);
    return {stage};
  }

  void reference(const Problem& problem, std::size_t, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    layernorm::reference(layer_of(problem), tensors, parallel);
  }

  std::vector<const Family*> families() const override {
    return joined({cuda_families(), cpu_families()});
  }
  /// What a user would write is PyTorch's kernel: bench/ compares with it.
  std::vector<Baseline> baselines(const Problem&, const DeviceFacts&) const override { return {}; }
};

}  // namespace

Layer layer_of(const Problem& problem) {
  Layer layer;
  layer.m = problem.size("m");
  layer.d = problem.size("d");
  layer.eps = static_cast<float>(problem.number("eps"));
  layer.backward = problem.pass == "bwd";
  layer.adds = problem.option("residual") == "yes";
  layer.dtype = problem.dtype;
  return layer;
}

TensorPlaces places_of(const Layer& layer) {
  return TensorPlaces(tensors_of(layer));
}

}  // namespace layernorm

const Op& layernorm_op() {
  static const layernorm::LayerNorm op;
  return op;
}

}  // namespace fftune
