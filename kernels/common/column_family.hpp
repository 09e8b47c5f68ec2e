// Families of CUDA kernels that keep each column of a matrix with one thread: what ops that work
// element by element, with or without sums over the rows, have in common.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common/stage_family.hpp"

namespace fftune {

/// The matrix that a kernel goes over.
struct ColumnWork {
  std::int64_t m = 0;  // rows
  std::int64_t h = 0;  // columns
  DType dtype = DType::f32;
  std::int64_t tensors = 2;  // of that shape that are read or written
  bool sums = false;  // column sums: a block loops over rows and writes one row of partial sums
};

class ColumnFamily : public StageFamily {
 public:
  /// A fallback has no parameters; its accesses are of one element, so any alignment is valid.
  explicit ColumnFamily(StageFamilyFacts facts) : StageFamily(std::move(facts)) {}

  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;

 protected:
  virtual ColumnWork work(const Problem&) const = 0;

  /// The kernel's parameters: `config`, or a fallback's own.
  Config resolved(const ColumnWork& work, const DeviceFacts& facts, const Config& config) const;
};

/// Of resolved parameters: "16, 256, 1, 4, true", what every kernel's template arguments end with.
std::string column_template_arguments(const Config& config);
std::int64_t column_blocks(const ColumnWork& work, const Config& config);
/// Blocks one below the other: enough for every row, or, where rows are summed, `waves` for each
/// SM.
std::int64_t row_blocks(const ColumnWork& work, const DeviceFacts& facts, const Config& config);
/// A launch of all blocks: m, h and the number of column blocks are appended to `arguments`. It is
/// programmatic: the kernel begins with wait_and_launch_dependents or wait_for_dependencies
/// (common/dependency.cuh).
KernelLaunch column_launch(const ColumnWork& work, const DeviceFacts& facts, const Config& config,
                           std::vector<Argument> arguments);

}  // namespace fftune
