// Families of CUDA kernels that keep each column of a matrix with one thread: what ops that work
// element by element, with or without sums over the rows, have in common.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "registry/family.hpp"

namespace fftune {

/// The matrix that a kernel goes over.
struct ColumnWork {
  std::int64_t m = 0;  // rows
  std::int64_t h = 0;  // columns
  DType dtype = DType::f32;
  std::string pass;          // the one that the kernel computes
  std::int64_t tensors = 2;  // of that shape which a thread reads or writes
  bool sums = false;  // over rows: blocks go on from row to row, and leave one row of sums each
};

class ColumnFamily : public Family {
 public:
  /// The texts are literals. A fallback has no parameters, and accesses of one element, for which
  /// any address will do.
  ColumnFamily(std::string_view name, std::string_view summary, const char* stage,
               const std::vector<std::string>& sources, bool fallback)
      : name_(name), summary_(summary), stage_(stage), sources_(sources), fallback_(fallback) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  bool is_fallback() const override { return fallback_; }
  std::vector<std::string> stages() const override { return {stage_}; }
  std::vector<std::string> sources() const override { return sources_; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;

 protected:
  virtual ColumnWork work(const Problem&) const = 0;

  /// The kernel's parameters: `config`, or a fallback's own.
  Config resolved(const ColumnWork& work, const DeviceFacts& facts, const Config& config) const;

 private:
  std::string_view name_;
  std::string_view summary_;
  const char* stage_;
  std::vector<std::string> sources_;
  bool fallback_;
};

/// Of resolved parameters: "16, 256, 1, 4, true", what every kernel's template arguments end with.
std::string column_template_arguments(const Config& config);
std::int64_t column_blocks(const ColumnWork& work, const Config& config);
/// Blocks one below the other: enough for every row, or, where rows are summed, `waves` for each
/// SM.
std::int64_t row_blocks(const ColumnWork& work, const DeviceFacts& facts, const Config& config);
/// A launch of all blocks: m, h and the number of column blocks are appended to `arguments`. It may
/// be programmatic: the kernel begins with wait_and_launch_dependents or wait_for_dependencies
/// (common/dependency.cuh).
KernelLaunch column_launch(const ColumnWork& work, const DeviceFacts& facts, const Config& config,
                           std::vector<Argument> arguments);

}  // namespace fftune
