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

/// The problem-dependent types and arguments of the kernel that a family launches.
struct ColumnKernel {
  std::string types;                // the first template arguments; the parameters follow
  std::vector<Argument> arguments;  // the first ones; the partial sums, m, h and blocks follow
  // Column sums have a kernel that adds the partial ones, a result and its type. Without a name the
  // partial sums are left as they are.
  std::string sum_name = {};
  DType sum_dtype = DType::f32;
  TensorArgument sum = {};
};

/// Summary of a family without sums.
constexpr std::string_view in_flight_summary = "16 bytes of several rows in flight a thread";

/// The matrix and the kernel of a problem. The kernel begins with wait_and_launch_dependents or
/// wait_for_dependencies (common/async.cuh), as its launch is programmatic.
struct ColumnFunctions {
  ColumnWork (*work)(const Problem&) = nullptr;
  ColumnKernel (*kernel)(const Problem&) = nullptr;
};

class ColumnFamily final : public StageFamily {
 public:
  /// A fallback has no parameters; its accesses are of one element, so any alignment is valid.
  ColumnFamily(StageFamilyFacts facts, ColumnFunctions functions)
      : StageFamily(std::move(facts)), functions_(functions) {}

  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;

 private:
  ColumnFunctions functions_;
};

/// The families of an op's folder for both passes: "forward_columns" and "backward_columns", whose
/// kernels, of the same name, are in a file of that name each, and their fallbacks.
/// `backward_summary`: of the family backward_columns.
std::vector<ColumnFamily> column_families(const std::string& folder, ColumnFunctions functions,
                                          std::string_view backward_summary);

}  // namespace fftune
