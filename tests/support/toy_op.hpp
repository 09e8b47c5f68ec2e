// A small op of two stages for tests: hidden = x aᵀ, y = hidden bᵀ, with host families.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "registry/op.hpp"

namespace fftune::test {

/// c [m,n] = a [m,k] · b [n,k]ᵀ with fp32 sums, every tensor in `dtype`.
void toy_product(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, const void* a,
                 const void* b, void* c);

/// Covers one of the two stages, or both when `stage` is empty (through scratch).
class ToyFamily final : public Family {
 public:
  ToyFamily(std::string name, std::string stage, bool fallback)
      : name_(std::move(name)), stage_(std::move(stage)), fallback_(fallback) {}
  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return "a toy"; }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  std::vector<std::string> stages() const override;
  bool is_fallback() const override { return fallback_; }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  Program program(const Problem& problem, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override { return {}; }

 private:
  std::string name_;
  std::string stage_;
  bool fallback_;
};

/// A family of both stages, which refuses nothing; its space and programs are the test's.
class WholeToyFamily : public Family {
 public:
  WholeToyFamily(std::string_view name, std::string_view summary, DeviceKind kind = DeviceKind::cpu)
      : name_(name), summary_(summary), kind_(kind) {}
  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  DeviceKind device_kind() const override { return kind_; }
  std::vector<std::string> stages() const override { return {"first", "second"}; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  std::vector<std::string> sources() const override { return {}; }

 private:
  std::string_view name_, summary_;
  DeviceKind kind_;
};

class ToyOp : public Op {
 public:
  std::string_view name() const override { return "toy"; }
  std::string_view summary() const override { return "y = x aᵀ bᵀ"; }
  std::vector<std::string> passes() const override { return {"fwd"}; }
  std::vector<SizeField> sizes() const override;
  std::vector<OptionField> options() const override { return {}; }
  std::vector<DType> dtypes(DeviceKind) const override;
  std::string_view token_size() const override { return "m"; }
  std::vector<TensorSpec> tensors(const Problem& problem) const override;
  std::vector<StageSpec> stages(const Problem& problem) const override;
  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel&) const override;
  std::vector<const Family*> families() const override;
  std::vector<Baseline> baselines(const Problem&, const DeviceFacts&) const override { return {}; }

  static Problem problem(DType dtype, std::int64_t m, std::int64_t d, std::int64_t h);

  mutable int reference_runs = 0;

 private:
  ToyFamily fused_{"toy_fused", "", false};
  ToyFamily first_{"toy_first", "first", false};
  ToyFamily second_{"toy_second", "second", false};
  ToyFamily first_fallback_{"first_fallback", "first", true};
  ToyFamily second_fallback_{"second_fallback", "second", true};
};

}  // namespace fftune::test
