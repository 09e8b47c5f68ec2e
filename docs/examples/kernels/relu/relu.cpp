#include "kernels/relu/relu.hpp"

#include <algorithm>

namespace fftune {
namespace {

class Relu : public Op {
 public:
  std::string_view name() const override { return "relu"; }
  std::string_view summary() const override { return "y = max(x, 0)"; }
  std::vector<std::string> passes() const override { return {"fwd"}; }
  std::vector<SizeField> sizes() const override {
    SizeField m;
    m.name = "m";
    m.help = "tokens";
    m.default_on_cuda = {16, 4096};
    m.default_on_cpu = {16, 512};
    SizeField d;
    d.name = "d";
    d.help = "features of a token";
    return {m, d};
  }
  std::vector<OptionField> options() const override { return {}; }
  std::vector<DType> dtypes(DeviceKind kind) const override {
    return {kind == DeviceKind::cpu ? DType::f32 : DType::bf16};
  }
  std::string_view token_size() const override { return "m"; }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const std::vector<std::int64_t> shape{problem.size("m"), problem.size("d")};
    return {{"x", problem.dtype, shape, Role::input}, {"y", problem.dtype, shape, Role::output}};
  }
  std::vector<StageSpec> stages(const Problem& problem) const override {
    StageSpec stage;
    stage.name = "relu";
    stage.inputs = {"x"};
    stage.outputs = {"y"};
    stage.flops = static_cast<double>(problem.size("m")) * static_cast<double>(problem.size("d"));
    stage.bytes = 2 * stage.flops * static_cast<double>(dtype_bytes(problem.dtype));
    return {stage};
  }

  void reference(const Problem&, std::size_t, ReferenceTensors& tensors, Parallel&) const override {
    std::vector<double> y = tensors.at("x");
    for (double& value : y) value = std::max(value, 0.0);
    tensors["y"] = std::move(y);
  }

  std::vector<const Family*> families() const override {
    return {&relu::relu_cuda_family(), &relu::cpu_relu_family()};
  }
  std::vector<Baseline> baselines(const Problem&, const DeviceFacts&) const override { return {}; }
};

}  // namespace

const Op& relu_op() {
  static const Relu op;
  return op;
}

}  // namespace fftune
