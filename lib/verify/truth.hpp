// What a verification compares with: random inputs of a few distinct rows, and their float64
// reference, stage by stage.
//
// Row i of every tensor that counts tokens in its first dimension depends on row i of the others
// alone (Op::token_size), so that 61 distinct rows stand for any number of tokens: row i is row
// i mod 61. 61 is a prime, so no tile size divides it and an exchange of rows or tiles shows.
//
// Where an input marks tokens (TensorSpec::pattern), row i depends on its mark too: there is a
// reference of every distinct row marked and of every one not marked, and the marks themselves may
// follow any pattern over all of the tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "registry/op.hpp"
#include "verify/reference_file.hpp"

namespace fftune {

/// One tensor's reference in a run of stages.
struct Expected {
  const std::vector<double>* values = nullptr;  // [period, columns], or more rows
  double norm = 0;                              // over all rows of the problem
  double root_mean_square = 0;
  double rounding_error = 0;  // relative: of a reference that rounds where the kernels round
  std::int64_t reduction_length = 0;
  double tolerance = 0;
};

class Truth {
 public:
  static constexpr std::int64_t most_distinct_rows = 61;

  /// What `kept` has of the references is not computed; null: all is.
  Truth(const Op& op, Problem problem, std::uint64_t seed, Parallel& parallel,
        ReferenceFile* kept = nullptr);

  /// The same layer at another number of tokens. Inputs that do not count tokens stay, and so do
  /// rows and references that are known already.
  void retoken(std::int64_t tokens);

  const Problem& problem() const { return problem_; }
  /// Of the whole problem, in the op's order.
  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  const std::vector<StageSpec>& stages() const { return stages_; }
  /// The tensor as a matrix: rows are its first dimension.
  std::int64_t rows(std::size_t tensor) const { return tensors_[tensor].shape.at(0); }
  std::int64_t columns(std::size_t tensor) const;
  /// How many of the rows are distinct; all of them where the tensor does not count tokens.
  std::int64_t period(std::size_t tensor) const;

  /// The distinct rows in the tensor's dtype: an input's random values, also of one that is
  /// updated, or the reference of a stage whose inputs were rounded, rounded.
  const std::vector<std::byte>& encoded(std::size_t tensor);

  /// The reference of a tensor, in a run that begins with `first_stage`, the inputs of which are
  /// rounded to their dtype; nothing is rounded after that. Valid until the next retoken.
  const Expected& expected(std::size_t first_stage, std::size_t tensor);

  /// The distinct row of each row, of a tensor whose rows depend on their marks; null of any other,
  /// where row i is distinct row i mod period(). Valid until the next retoken.
  const std::int64_t* sources(std::size_t tensor) const;

  /// Keeps what was computed so far; to be called once it has proved right.
  void keep();

  /// The stage that writes or updates the tensor, or the number of stages for an input.
  std::size_t producer(std::size_t tensor) const;

 private:
  void draw_inputs();
  void draw_marks();
  Problem distinct_problem() const;
  const ReferenceTensors& unrounded(std::size_t first_stage, std::size_t stage);
  std::string key_of(std::size_t first_stage, std::size_t stage, const std::string& tensor) const;
  /// The outputs of the stage, if all of them were kept.
  std::optional<ReferenceTensors> kept_outputs(std::size_t first_stage, std::size_t stage) const;

  const Op* op_;
  Problem problem_;
  std::uint64_t seed_;
  Parallel* parallel_;
  ReferenceFile* kept_;
  std::vector<TensorSpec> tensors_;
  std::vector<StageSpec> stages_;
  std::vector<bool> counts_tokens_;
  bool rows_repeat_ = true;                   // rows are alike, and every output counts tokens
  std::int64_t known_rows_ = 0;               // of the tensors that count tokens
  std::optional<std::size_t> marking_;        // the input that marks tokens
  std::vector<std::uint8_t> marks_;           // of all tokens
  std::vector<std::int64_t> sources_;         // by token, where marked rows repeat
  std::vector<std::int64_t> sorted_sources_;  // in the order of the marks
  std::vector<std::vector<std::byte>> encoded_;
  std::map<std::pair<std::size_t, std::size_t>, ReferenceTensors> unrounded_;
  std::set<std::pair<std::size_t, std::size_t>> not_kept_;  // of unrounded_
  std::map<std::pair<std::size_t, std::size_t>, Expected> expected_;
};

}  // namespace fftune
