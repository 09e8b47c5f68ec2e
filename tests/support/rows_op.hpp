// An op of rows. A test adds its tensors, stages and reference.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "registry/op.hpp"

namespace fftune::test {

/// An op of m rows in one type, without a family.
class RowsOp : public Op {
 public:
  std::vector<std::string> passes() const override { return {"fwd"}; }
  std::vector<SizeField> sizes() const override {
    return {{.name = "m", .help = "rows", .default_on_cuda = {}, .default_on_cpu = {}}};
  }
  std::vector<OptionField> options() const override { return {}; }
  std::vector<DType> dtypes(DeviceKind) const override { return {dtype_}; }
  std::string_view token_size() const override { return "m"; }
  bool rows_are_alike(const Problem&) const override { return alike_; }
  std::vector<const Family*> families() const override { return {}; }
  std::vector<Baseline> baselines(const Problem&, const DeviceFacts&) const override { return {}; }

 protected:
  explicit RowsOp(DType dtype = DType::f32, bool alike = true) : dtype_(dtype), alike_(alike) {}
  DType dtype_;
  bool alike_;
};

}  // namespace fftune::test
