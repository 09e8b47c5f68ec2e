#include "support/fake_op.hpp"

namespace fftune::testing {

FakeFamily& FakeFamily::fallback() {
  fallback_ = true;
  return *this;
}

FakeFamily& FakeFamily::refuse(std::function<std::optional<std::string>(const Problem&)> why) {
  why_ = std::move(why);
  return *this;
}

FakeFamily& FakeFamily::not_preferred() {
  preferred_ = false;
  return *this;
}

std::optional<std::string> FakeFamily::refusal(const Problem& problem, const DeviceFacts&) const {
  return why_ ? why_(problem) : std::nullopt;
}

Space FakeFamily::space(const Problem& problem, const DeviceFacts&) const {
  Space space;
  space.parameter("block", "columns", {8, 16, 32})
      .constraint("block must divide n", [n = problem.size("n")](const Config& config) {
        return n % config.at("block") == 0;
      });
  return space;
}

Config FakeFamily::default_config(const Problem&, const DeviceFacts&) const {
  return {{"block", 8}};
}

FakeOp& FakeOp::family(const Family& family) {
  families_.push_back(&family);
  return *this;
}

std::vector<SizeField> FakeOp::sizes() const {
  return {{"m", "tokens", 1 << 20, {1, 64}, {1, 16}}, {"n", "columns", 4096, {}, {}}};
}

std::vector<OptionField> FakeOp::options() const {
  return {{"act", "activation", {"silu", "relu"}},
          {"bias", "add a bias", {"no", "yes"}},
          {.name = "eps",
           .help = "added to a divisor",
           .choices = {"1e-06"},
           .number = NumberRange{0, 1}}};
}

std::vector<DType> FakeOp::dtypes(DeviceKind kind) const {
  return kind == DeviceKind::cpu ? std::vector{DType::f32, DType::bf16}
                                 : std::vector{DType::bf16, DType::fp16};
}

std::vector<TensorSpec> FakeOp::tensors(const Problem& problem) const {
  const std::vector<std::int64_t> shape{problem.size("m"), problem.size("n")};
  std::vector<TensorSpec> tensors{{"x", problem.dtype, shape, Role::input, 1.0},
                                  {"y", problem.dtype, shape, Role::output, 1.0}};
  for (std::size_t i = 0; i + 1 < stage_names_.size(); ++i)
    tensors.push_back({stage_names_[i] + "_out", problem.dtype, shape, Role::intermediate, 1.0});
  return tensors;
}

std::vector<StageSpec> FakeOp::stages(const Problem& problem) const {
  const auto elements = static_cast<double>(problem.size("m") * problem.size("n"));
  std::vector<StageSpec> stages;
  for (std::size_t i = 0; i < stage_names_.size(); ++i) {
    StageSpec stage;
    stage.name = stage_names_[i];
    stage.inputs = {i == 0 ? "x" : stage_names_[i - 1] + "_out"};
    stage.outputs = {i + 1 == stage_names_.size() ? "y" : stage_names_[i] + "_out"};
    stage.flops = elements;
    stage.bytes = 2 * elements * static_cast<double>(dtype_bytes(problem.dtype));
    stages.push_back(stage);
  }
  return stages;
}

void FakeOp::reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                       Parallel&) const {
  const StageSpec spec = stages(problem)[stage];
  auto values = tensors.at(spec.inputs.front());
  if (stage == 0)
    for (double& value : values) value *= 4;
  tensors[spec.outputs.front()] = std::move(values);
}

Problem fake_problem(std::int64_t m, std::int64_t n) {
  return {"quadruple",
          "fwd",
          DType::f32,
          {{"m", m}, {"n", n}},
          {{"act", "silu"}, {"bias", "no"}, {"eps", "1e-06"}}};
}

}  // namespace fftune::testing
