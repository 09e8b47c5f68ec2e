// The test data of a verification: inputs of a few distinct rows.
//
// Row i of every tensor that has the tokens as its first dimension depends only on row i of the
// others (Op::token_size). So 61 distinct rows, repeated, represent any number of tokens: row i is
// row i mod 61. 61 is a prime, so no tile size divides it and swapped rows or tiles show. Where an
// output has no token dimension, or rows are not alike, every row is distinct.
//
// Where an input is a mask over the tokens (TensorSpec::pattern), row i depends on its mark too:
// every distinct row exists twice, marked and unmarked, and the marks may follow any pattern over
// the tokens. Where every row is distinct, each has its token's mark. Distinct rows are in token
// order, also for a tensor whose rows are sorted by mark.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "verify/input_data.hpp"

namespace fftune {

class DistinctRows {
 public:
  static constexpr std::int64_t most_where_alike = 61;

  DistinctRows(const Op& op, Problem problem, InputData data, Parallel& parallel);

  /// The same layer at another number of tokens. Inputs that do not count tokens stay, and so do
  /// rows that are known already: a row depends only on its number.
  void retoken(std::int64_t tokens);

  const Op& op() const { return *op_; }
  const Problem& problem() const { return problem_; }
  std::uint64_t seed() const { return data_.seed; }
  /// InputData::in_place of a tensor; null: it is not there.
  void* in_place(std::size_t tensor) const {
    const auto found = data_.in_place.find(tensors_[tensor].name);
    return found == data_.in_place.end() ? nullptr : found->second;
  }
  /// Whether some values were given.
  bool any_given() const { return data_.given != nullptr; }
  /// Tensors of the whole problem, in the op's order.
  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  const std::vector<StageSpec>& stages() const { return stages_; }
  /// The tensor as a matrix: rows are its first dimension.
  std::int64_t rows(std::size_t tensor) const { return tensors_[tensor].shape.at(0); }
  std::int64_t columns(std::size_t tensor) const;
  bool counts_tokens(std::size_t tensor) const { return counts_tokens_[tensor]; }
  /// The stage that writes or updates the tensor, or the number of stages for an input.
  std::size_t producer(std::size_t tensor) const;

  /// How many rows of the tensors that count tokens are distinct.
  std::int64_t count() const { return count_; }
  /// Whether they stand for any number of tokens.
  bool repeat() const { return repeat_; }
  /// Their marks; empty where nothing marks tokens.
  const std::vector<std::uint8_t>& marks() const { return marks_; }
  std::optional<std::size_t> marking() const { return marking_; }

  /// How many of a tensor's own rows are distinct; all where it does not count tokens.
  std::int64_t period(std::size_t tensor) const;
  /// The distinct row of each row, where it is not row i mod period(); else null. Valid until the
  /// next retoken.
  const std::int64_t* sources(std::size_t tensor) const;
  /// An input's values in its dtype: the distinct rows if it has a token dimension; empty for
  /// tensors that are no inputs.
  const std::vector<std::byte>& drawn(std::size_t tensor) const { return drawn_[tensor]; }

 private:
  void draw_inputs();
  void draw(const TensorSpec& spec, std::span<std::byte> out) const;
  void draw_marks();

  const Op* op_;
  Problem problem_;
  InputData data_;
  Parallel* parallel_;
  std::vector<TensorSpec> tensors_;
  std::vector<StageSpec> stages_;
  std::vector<bool> counts_tokens_;
  bool repeat_ = true;  // rows are alike, and every output counts tokens
  std::int64_t count_ = 0;
  std::optional<std::size_t> marking_;        // the input that marks tokens
  std::vector<std::uint8_t> marks_;           // of the distinct rows
  std::vector<std::int64_t> sources_;         // by token, where marked rows repeat
  std::vector<std::int64_t> sorted_sources_;  // in the order of the marks
  std::vector<std::vector<std::byte>> drawn_;
};

}  // namespace fftune
