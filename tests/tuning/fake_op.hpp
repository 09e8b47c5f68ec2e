// An op of up to three stages "a", "b", "c" with families that cover what a test wants.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "registry/catalog.hpp"

namespace fftune {

class FakeFamily : public Family {
 public:
  FakeFamily(std::string name, std::vector<std::string> stages, int variants)
      : name_(std::move(name)), stages_(std::move(stages)), variants_(variants) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return "made up"; }
  DeviceKind device_kind() const override { return kind; }
  std::vector<std::string> stages() const override { return stages_; }
  bool is_fallback() const override { return fallback; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  Program program(const Problem&, const DeviceFacts&, const Config&) const override { return {}; }
  std::vector<std::string> sources() const override { return {"fake.cu"}; }

  DeviceKind kind = DeviceKind::cpu;
  bool fallback = false;
  std::optional<std::string> refused;
  std::int64_t default_value = 0;

 private:
  std::string name_;
  std::vector<std::string> stages_;
  int variants_;
};

class FakeOp : public Op {
 public:
  explicit FakeOp(int stages) : stages_(stages) {}

  FakeFamily& add(std::string name, std::vector<std::string> stages, int variants);

  std::string_view name() const override { return "fake"; }
  std::string_view summary() const override { return "made up"; }
  std::vector<std::string> passes() const override { return {"fwd"}; }
  std::vector<SizeField> sizes() const override { return {{"m", "tokens", 1 << 20, {1}, {1}}}; }
  std::vector<OptionField> options() const override { return {}; }
  std::vector<DType> dtypes(DeviceKind) const override { return {DType::f32}; }
  std::string_view token_size() const override { return "m"; }
  std::vector<TensorSpec> tensors(const Problem& problem) const override;
  std::vector<StageSpec> stages(const Problem& problem) const override;
  void reference(const Problem&, std::size_t, ReferenceTensors&, Parallel&) const override {}
  std::vector<const Family*> families() const override;
  std::vector<Baseline> baselines(const Problem&, const DeviceFacts&) const override;
  std::vector<OpPart> parts(const Problem& problem) const override;

  bool is_made_of_ops = false;

 private:
  int stages_;
  std::vector<std::unique_ptr<FakeFamily>> families_;
};

/// A catalog of one op, with its problem.
struct FakeCatalog {
  explicit FakeCatalog(int stages) : op(stages) {}
  /// One stage, and one family "f" with that number of variants.
  static FakeCatalog of_variants(int variants);

  Catalog catalog() const { return {{&op}, &sources}; }
  Problem problem(std::int64_t m = 1) const { return {"fake", "fwd", DType::f32, {{"m", m}}, {}}; }

  FakeOp op;
  SourceSet sources{{{"fake.cu", "made up"}}};
};

}  // namespace fftune
