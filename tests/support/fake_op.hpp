// A small op and its families, whose every answer a test sets.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/problem.hpp"
#include "core/space.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"
#include "registry/family.hpp"
#include "registry/op.hpp"

namespace fftune::testing {

/// A family with one parameter, `block`, out of 8, 16 and 32; it must divide the size n.
class FakeFamily : public Family {
 public:
  FakeFamily(std::string name, DeviceKind kind, std::vector<std::string> stages)
      : name_(std::move(name)), kind_(kind), stages_(std::move(stages)) {}

  FakeFamily& fallback() {
    fallback_ = true;
    return *this;
  }
  /// Refuses the problems for which `why` has a reason.
  FakeFamily& refuse(std::function<std::optional<std::string>(const Problem&)> why) {
    why_ = std::move(why);
    return *this;
  }
  /// Makes no claim to be faster than the families behind it.
  FakeFamily& not_preferred() {
    preferred_ = false;
    return *this;
  }

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return "a family for tests"; }
  DeviceKind device_kind() const override { return kind_; }
  std::vector<std::string> stages() const override { return stages_; }
  bool is_fallback() const override { return fallback_; }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    return why_ ? why_(problem) : std::nullopt;
  }
  Space space(const Problem& problem, const DeviceFacts&) const override {
    Space space;
    space.parameter("block", "columns", {8, 16, 32})
        .constraint("block must divide n", [n = problem.size("n")](const Config& config) {
          return n % config.at("block") == 0;
        });
    return space;
  }
  Config default_config(const Problem&, const DeviceFacts&) const override {
    return {{"block", 8}};
  }
  bool is_preferred(const Problem&, const DeviceFacts&) const override { return preferred_; }
  Program program(const Problem&, const DeviceFacts&, const Config&) const override { return {}; }
  std::vector<std::string> sources() const override { return {}; }

 private:
  std::string name_;
  DeviceKind kind_;
  std::vector<std::string> stages_;
  bool fallback_ = false, preferred_ = true;
  std::function<std::optional<std::string>(const Problem&)> why_;
};

/// y [m,n] = 4·x [m,n], in as many stages as are named; every stage but the last writes an
/// intermediate of y's shape.
class FakeOp : public Op {
 public:
  explicit FakeOp(std::vector<std::string> stages) : stage_names_(std::move(stages)) {}

  FakeOp& family(const Family& family) {
    families_.push_back(&family);
    return *this;
  }

  std::string_view name() const override { return "quadruple"; }
  std::string_view summary() const override { return "y = 4x"; }
  std::vector<std::string> passes() const override { return {"fwd", "bwd"}; }
  std::vector<SizeField> sizes() const override {
    return {{"m", "tokens", 1 << 20, {1, 64}, {1, 16}}, {"n", "columns", 4096, {}, {}}};
  }
  std::vector<OptionField> options() const override {
    return {{"act", "activation", {"silu", "relu"}},
            {"bias", "add a bias", {"no", "yes"}},
            {.name = "eps",
             .help = "added to a divisor",
             .choices = {"1e-06"},
             .number = NumberRange{0, 1}}};
  }
  std::vector<DType> dtypes(DeviceKind kind) const override {
    return kind == DeviceKind::cpu ? std::vector{DType::f32, DType::bf16}
                                   : std::vector{DType::bf16, DType::fp16};
  }
  std::string_view token_size() const override { return "m"; }
  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const std::vector<std::int64_t> shape{problem.size("m"), problem.size("n")};
    std::vector<TensorSpec> tensors{{"x", problem.dtype, shape, Role::input, 1.0},
                                    {"y", problem.dtype, shape, Role::output, 1.0}};
    for (std::size_t i = 0; i + 1 < stage_names_.size(); ++i)
      tensors.push_back({stage_names_[i] + "_out", problem.dtype, shape, Role::intermediate, 1.0});
    return tensors;
  }
  std::vector<StageSpec> stages(const Problem& problem) const override {
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
  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel&) const override {
    const StageSpec spec = stages(problem)[stage];
    auto values = tensors.at(spec.inputs.front());
    if (stage == 0)
      for (double& value : values) value *= 4;
    tensors[spec.outputs.front()] = std::move(values);
  }
  std::vector<const Family*> families() const override { return families_; }
  std::vector<Baseline> baselines(const Problem&, const DeviceFacts&) const override { return {}; }

 private:
  std::vector<std::string> stage_names_;
  std::vector<const Family*> families_;
};

/// A problem of FakeOp that is canonical on the CPU.
inline Problem fake_problem(std::int64_t m, std::int64_t n) {
  return {"quadruple",
          "fwd",
          DType::f32,
          {{"m", m}, {"n", n}},
          {{"act", "silu"}, {"bias", "no"}, {"eps", "1e-06"}}};
}

}  // namespace fftune::testing
