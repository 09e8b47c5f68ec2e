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

  FakeFamily& fallback();
  /// Refuses the problems for which `why` has a reason.
  FakeFamily& refuse(std::function<std::optional<std::string>(const Problem&)> why);
  /// Makes no claim to be faster than the families behind it.
  FakeFamily& not_preferred();

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return "a family for tests"; }
  DeviceKind device_kind() const override { return kind_; }
  std::vector<std::string> stages() const override { return stages_; }
  bool is_fallback() const override { return fallback_; }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override;
  Space space(const Problem& problem, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
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

  FakeOp& family(const Family& family);

  std::string_view name() const override { return "quadruple"; }
  std::string_view summary() const override { return "y = 4x"; }
  std::vector<std::string> passes() const override { return {"fwd", "bwd"}; }
  std::vector<SizeField> sizes() const override;
  std::vector<OptionField> options() const override;
  std::vector<DType> dtypes(DeviceKind kind) const override;
  std::string_view token_size() const override { return "m"; }
  std::vector<TensorSpec> tensors(const Problem& problem) const override;
  std::vector<StageSpec> stages(const Problem& problem) const override;
  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel&) const override;
  std::vector<const Family*> families() const override { return families_; }
  std::vector<Baseline> baselines(const Problem&, const DeviceFacts&) const override { return {}; }

 private:
  std::vector<std::string> stage_names_;
  std::vector<const Family*> families_;
};

/// A problem of FakeOp that is canonical on the CPU.
Problem fake_problem(std::int64_t m, std::int64_t n);

}  // namespace fftune::testing
