// Where a plan's tensors are: the caller's buffers, and the intermediates in the workspace.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "device/backend.hpp"
#include "registry/op.hpp"

namespace fftune {

using Executables = std::vector<std::shared_ptr<const Executable>>;

/// A plan's tensors, at most: a run keeps their addresses on its stack.
constexpr std::size_t most_tensors = 4096;

class TensorLayout {
 public:
  /// Throws Error(unavailable) if the tensors do not fit in the device's memory.
  TensorLayout(const Op& op, const Problem& problem, const DeviceFacts& facts);

  /// The op's tensors in order; the first buffer_count() of them are the caller's buffers.
  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  std::size_t buffer_count() const { return buffer_count_; }
  /// Intermediates, then `scratch_bytes` that the executables share.
  std::size_t workspace_bytes(std::size_t scratch_bytes) const;

  /// Enqueues the executables one after the other. Allocates nothing.
  void enqueue(const Executables& executables, void* const* buffers, void* workspace,
               void* stream) const;

 private:
  std::vector<TensorSpec> tensors_;
  std::size_t buffer_count_ = 0;
  std::vector<std::size_t> intermediate_offsets_;  // in the workspace
  std::size_t scratch_offset_ = 0;
};

}  // namespace fftune
