// A plan for any number of tokens of a layer, up to a limit that is known beforehand.
//
// The variants of every segment of token counts are compiled when it is made. A token count is
// bound to its segment's variant when it is first run or prepared, which makes the launches'
// parameters (some 10 µs) and compiles nothing; after that, finding it is one load.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/backend.hpp"
#include "runtime/choice.hpp"
#include "runtime/plan.hpp"

namespace fftune {

// Which recipe serves which number of tokens of a layer, for a plan that is run with any.

/// One recipe for a range of token counts.
struct TokenSegment {
  std::int64_t first = 1;  // both ends included
  std::int64_t last = 1;
  std::int64_t chosen_at = 1;  // the token count that `choice` was made for
  Choice choice;
  bool each = false;  // every token count has the op's default of its own, not `choice`
};

/// The segments of 1 to `most`'s tokens, in order and without gaps. A choice is made for each token
/// count that a preset of this layer records, and for others where those are more than 4 times
/// apart or where neither of two serves between them. Between two choices the cost model decides
/// where the second takes over; without one, it is their geometric mean. An op whose variants serve
/// single token counts, such as those that are a multiple of a vector, has the segments of its
/// records, and between them one of `each`. `most` must be canonical. Throws the errors of
/// choose().
std::vector<TokenSegment> token_segments(const Catalog& catalog, const Op& op, const Problem& most,
                                         const DeviceFacts& facts, const PresetLibrary& presets);

/// The recipe for `tokens` of the segment: its choice, or the op's default if a constraint excludes
/// this token count.
Recipe recipe_at(const Op& op, const Problem& most, const DeviceFacts& facts,
                 const TokenSegment& segment, std::int64_t tokens);

/// The token counts of a segment whose programs show every kernel that it needs and the most
/// scratch: all up to a bound, and then 128 an octave.
std::vector<std::int64_t> scanned_tokens(const TokenSegment& segment);

class TokenPlan {
 public:
  /// For 1 to `most`'s tokens. Compiles on `backend`, which must outlive the plan, on several
  /// threads. Throws Error(invalid_input) if the op has kernels for single token counts,
  /// Error(unavailable) if a variant does not compile.
  TokenPlan(const Catalog& catalog, Backend& backend, const Op& op, Problem most,
            const PresetLibrary& presets);

  /// Binds a token count, so that its first run allocates nothing. Throws Error(invalid_input) for
  /// one out of range.
  void prepare(std::int64_t tokens) const;

  /// As Plan::run() of a plan for `tokens`, which must be in range.
  void run(std::int64_t tokens, void* const* buffers, void* workspace, void* stream) const;

  const Op& op() const { return *op_; }
  const Problem& most() const { return most_; }
  std::int64_t most_tokens() const { return most_.size(op_->token_size()); }
  const std::vector<TokenSegment>& segments() const { return segments_; }
  /// With the most tokens.
  const std::vector<TensorSpec>& tensors() const { return layout_.tensors(); }
  std::size_t buffer_count() const { return layout_.buffer_count(); }
  /// Enough for every token count.
  std::size_t workspace_bytes() const { return layout_.workspace_bytes(scratch_bytes_); }

 private:
  struct Binding {
    std::int64_t tokens = 0;
    Executables executables;
  };
  using Slot = std::atomic<std::shared_ptr<const Binding>>;

  void compile();
  std::shared_ptr<const Binding> binding(std::int64_t tokens) const;
  std::shared_ptr<const Binding> bind(std::int64_t tokens) const;

  Backend* backend_;
  const Op* op_;
  Problem most_;
  std::vector<TokenSegment> segments_;
  TensorLayout layout_;
  std::size_t scratch_bytes_ = 0;
  Executables compiled_;  // hold the kernels for as long as the plan lives
  /// By the token count modulo their number: one that is bound takes the place of another.
  mutable std::vector<Slot> slots_;
};

}  // namespace fftune
