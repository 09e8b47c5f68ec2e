// A plan: a problem bound to one variant per stage, compiled, ready to run.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "device/backend.hpp"
#include "registry/catalog.hpp"

namespace fftune {

class Plan {
 public:
  /// Compiles every variant of `recipe` on `backend`, which must outlive the plan. Throws
  /// Error(invalid_input) if a variant is illegal, Error(unavailable) if one does not compile.
  Plan(Backend& backend, const Op& op, Problem problem, Recipe recipe);

  /// Reads and writes `buffers` (the op's inputs, then outputs, device addresses) on `stream`.
  /// `workspace` has workspace_bytes(), 256-byte aligned. Allocates nothing, never synchronises.
  void run(void* const* buffers, void* workspace, void* stream) const;

  const Op& op() const { return *op_; }
  const Problem& problem() const { return problem_; }
  const Recipe& recipe() const { return recipe_; }
  /// The op's tensors in order; the first buffer_count() of them are the caller's buffers.
  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  std::size_t buffer_count() const { return buffer_count_; }
  /// Intermediates, then the largest workspace of any variant.
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  const std::vector<std::shared_ptr<const Executable>>& executables() const { return executables_; }

 private:
  const Op* op_;
  Problem problem_;
  Recipe recipe_;
  std::vector<TensorSpec> tensors_;
  std::size_t buffer_count_ = 0;
  std::vector<std::size_t> intermediate_offsets_;  // in the workspace
  std::size_t scratch_offset_ = 0;
  std::size_t workspace_bytes_ = 0;
  std::vector<std::shared_ptr<const Executable>> executables_;
};

}  // namespace fftune
