// A plan: a problem bound to one variant per stage, compiled, ready to run.
#pragma once

#include <vector>

#include "device/backend.hpp"
#include "registry/catalog.hpp"
#include "runtime/tensor_layout.hpp"

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
  const std::vector<TensorSpec>& tensors() const { return layout_.tensors(); }
  std::size_t buffer_count() const { return layout_.buffer_count(); }
  /// Intermediates, then the largest workspace of any variant.
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  const Executables& executables() const { return executables_; }

 private:
  const Op* op_;
  Problem problem_;
  Recipe recipe_;
  TensorLayout layout_;
  std::size_t workspace_bytes_ = 0;
  Executables executables_;
};

}  // namespace fftune
