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
#include "runtime/plan.hpp"
#include "runtime/token_segments.hpp"

namespace fftune {

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
