// The float64 references of the distinct rows, of any run of stages.
//
// References of fewer tokens are reused for more. Row i of a tensor with a token dimension depends
// only on row i of the others and on its mark, and an output that is a sum over the tokens
// (TensorSpec::sums_tokens) extends the sum over fewer: S(m + 1) = S(m) + S({row m}), in float64.
// So the tokens are split into parts, each computed as a problem of its own; new tokens are a new
// part. A token whose mark has changed is subtracted from the sums by one part and added again by
// another. An op for which this does not hold has all of its tokens in one part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device/program.hpp"
#include "verify/distinct_rows.hpp"

namespace fftune {

// References that outlive the process which computed them: float64 tensors in an unnamed file in
// memory, which a supervisor passes from one worker to the next.

/// Not for several processes at once: a worker has ended before the next one begins.
class ReferenceFile {
 public:
  /// The descriptor, open to read and write, stays the caller's.
  explicit ReferenceFile(int descriptor) : descriptor_(descriptor) {}

  /// The `count` values stored under the key; none if they are missing or damaged, since a
  /// reference can always be computed again.
  std::vector<double> find(const std::string& key, std::size_t count, Parallel& parallel) const;
  /// Stores them, unless they take more memory than recomputing them is worth.
  void keep(const std::string& key, const std::vector<double>& values, Parallel& parallel);

 private:
  int descriptor_;
};

class References {
 public:
  /// References in `kept` are not computed; null: all are computed. `rows` has to outlive this.
  References(const DistinctRows& rows, Parallel& parallel, ReferenceFile* kept);

  /// After the rows have been given another number of tokens.
  void follow();

  /// The distinct rows of a tensor that a stage writes, in a run that begins with `first_stage`.
  /// The run's inputs are rounded to their dtype; nothing is rounded after that. Valid until the
  /// next follow().
  std::vector<const double*> rows(std::size_t first_stage, std::size_t tensor);

  /// Keeps the references computed so far; to be called once they have proved right.
  void keep();

 private:
  struct Run {
    std::size_t first_stage;
    std::size_t stage;
    auto operator<=>(const Run&) const = default;
  };
  struct Part {
    std::vector<std::int64_t> tokens;    // in their order
    std::vector<std::uint8_t> marks;     // of them, if tokens are marked
    std::vector<std::int64_t> by_marks;  // the same tokens, in the order of the marks
    bool taken_away = false;             // from the sums
    std::map<Run, ReferenceTensors> outputs;
  };
  struct TokenRow {
    std::size_t part;
    std::size_t row;         // of its tensors in the tokens' order
    std::size_t sorted_row;  // of those in the order of the marks
  };

  bool can_extend() const;
  /// The run of the stage alone, where that computes the same: of what comes from the run's earlier
  /// stages it reads integers only, which rounding leaves as they are.
  Run simplest(Run run) const;
  std::vector<std::int64_t> changed_tokens() const;
  void add_part(std::vector<std::int64_t> tokens, const std::vector<std::uint8_t>& marks,
                bool taken_away);
  /// Outputs of the run's stage for a part; those of later parts omit the initial values of sums.
  const ReferenceTensors& outputs(Run run, std::size_t part);
  /// The input's values for a part.
  std::vector<double> given(std::size_t tensor, std::size_t part) const;
  std::vector<double> rounded(DType dtype, const std::vector<double>& values) const;
  /// Makes the sums of the first part those of all parts.
  void add_up(Run run);

  std::string key_of(Run run, const std::string& tensor) const;
  /// The outputs of the stage, if all of them were kept.
  ReferenceTensors kept_outputs(Run run) const;

  const DistinctRows* rows_;
  Parallel* parallel_;
  ReferenceFile* kept_;
  std::int64_t count_ = 0;           // of the tokens below
  std::vector<std::uint8_t> marks_;  // theirs
  std::vector<Part> parts_;
  std::vector<TokenRow> token_rows_;     // of each token
  std::map<Run, std::size_t> added_up_;  // how many parts are in the run's sums
  std::set<Run> not_kept_;
};

}  // namespace fftune
