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

/// The kernel that a family launches: `name` of the one file of its sources, and its
/// problem-dependent types and arguments.
struct ColumnKernel {
  std::string types;                // the first template arguments; the parameters follow
  std::vector<Argument> arguments;  // the first ones; the partial sums, m, h and blocks follow
  // Of column sums: the kernel that adds the partial ones, the result and its type.
  std::string sum_name = {};
  DType sum_dtype = DType::f32;
  TensorArgument sum = {};
};

class ColumnFamily : public StageFamily {
 public:
  /// A fallback has no parameters; its accesses are of one element, so any alignment is valid.
  /// `kernel` begins with wait_and_launch_dependents or wait_for_dependencies
  /// (common/async.cuh), as its launch is programmatic.
  ColumnFamily(StageFamilyFacts facts, const char* kernel)
      : StageFamily(std::move(facts)), kernel_(kernel) {}

  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;

 protected:
  virtual ColumnWork work(const Problem&) const = 0;
  virtual ColumnKernel kernel(const Problem&) const = 0;

 private:
  const char* kernel_;
};

}  // namespace fftune
