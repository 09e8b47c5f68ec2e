// The truth that a verification compares with: the float64 reference of its test data and the
// allowed distance from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "verify/distinct_rows.hpp"
#include "verify/references.hpp"

namespace fftune {

/// One tensor's reference in a run of stages.
struct Expected {
  std::vector<const double*> rows;  // the distinct ones, of columns() values each
  // Over all rows of the problem; for an updated tensor, over those that are rounded.
  double norm = 0;
  double root_mean_square = 0;
  double rounding_error = 0;  // relative: of a reference that rounds where the kernels round
  // Of given values: by how much the errors of that reference are larger in each distinct row than
  // in all together, at least 1. Empty: random rows are alike.
  std::vector<double> row_factors;
  /// The distinct rows of that reference, where they decide the bounds of elements: those of a
  /// tensor that a stage updates, of a finer dtype than what the run rounds before it. Else empty.
  std::vector<const double*> rounded;
  std::int64_t distinct = 0;  // finite elements of the distinct rows among those
  /// The distinct rows: where the reference is NaN and a group of InputData::substitutes leaves it
  /// one number, that number; else NaN. Empty without substitutes, and without NaN.
  std::vector<std::vector<double>> independent;
  std::int64_t reduction_length = 0;
  double tolerance = 0;
};

class Truth {
 public:
  /// References in `kept` are not computed; null: all are computed.
  Truth(const Op& op, Problem problem, InputData data, Parallel& parallel,
        ReferenceFile* kept = nullptr);
  Truth(const Truth&) = delete;
  Truth& operator=(const Truth&) = delete;

  /// The same layer at another number of tokens. Inputs that do not count tokens stay, and so do
  /// rows and references that are known already.
  void retoken(std::int64_t tokens);

  const DistinctRows& data() const { return rows_; }
  const Problem& problem() const { return rows_.problem(); }
  const std::vector<TensorSpec>& tensors() const { return rows_.tensors(); }
  const std::vector<StageSpec>& stages() const { return rows_.stages(); }
  std::int64_t rows(std::size_t tensor) const { return rows_.rows(tensor); }
  std::int64_t columns(std::size_t tensor) const { return rows_.columns(tensor); }
  std::int64_t period(std::size_t tensor) const { return rows_.period(tensor); }
  const std::int64_t* sources(std::size_t tensor) const { return rows_.sources(tensor); }
  std::size_t producer(std::size_t tensor) const { return rows_.producer(tensor); }
  /// Those that have values, from the first on: all, but where TensorSpec::live_rows says
  /// otherwise.
  std::int64_t live_rows(std::size_t tensor);

  /// The distinct rows in the tensor's dtype, as a run that begins with `first_stage` finds them:
  /// an input's values, also of one that the run updates, or the reference of a stage whose
  /// inputs were rounded, rounded. Valid until the next retoken.
  const std::vector<std::byte>& encoded(std::size_t tensor, std::size_t first_stage = 0);

  /// The reference of a tensor, in a run that begins with `first_stage`. The run's inputs are
  /// rounded to their dtype; nothing is rounded after that. Valid until the next retoken.
  const Expected& expected(std::size_t first_stage, std::size_t tensor);

  /// Keeps the references computed so far; to be called once they have proved right.
  void keep() { references_.keep(); }

 private:
  /// Sets the norm, the root of the mean square and the error of rounding, over `rows` rows.
  void measure(std::size_t tensor, std::int64_t rows,
               const std::vector<const double*>& before_rounding, Expected& expected) const;

  /// Whether a run that begins with `first_stage` updates the tensor by values of coarser dtypes,
  /// which it has rounded.
  bool updates_by_rounded(std::size_t first_stage, std::size_t tensor) const;

  /// Sets what is independent of values that are no numbers.
  void find_independent(std::size_t first_stage, std::size_t tensor, Expected& expected);

  /// The same problem with other values in its inputs.
  struct Substitute {
    Substitute(const Op& op, const Problem& problem, InputData data, Parallel& parallel)
        : rows(op, problem, std::move(data), parallel), references(rows, parallel, nullptr) {}
    DistinctRows rows;
    References references;
  };

  Parallel* parallel_;
  DistinctRows rows_;
  References references_;
  std::vector<std::vector<std::unique_ptr<Substitute>>> substitutes_;  // in groups
  std::map<std::size_t, std::vector<std::byte>> encoded_;              // of what stages write
  std::map<std::pair<std::size_t, std::size_t>, Expected> expected_;
};

}  // namespace fftune
