#include "runtime/tensor_layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/error.hpp"
#include "registry/catalog.hpp"

namespace fftune {
namespace {

constexpr std::size_t alignment = 256;

std::size_t align_up(std::size_t bytes) {
  return (bytes + alignment - 1) / alignment * alignment;
}

/// In double, because the sizes of a problem may multiply beyond 64 bits.
void check_memory(const Problem& problem, const std::vector<TensorSpec>& tensors,
                  const DeviceFacts& facts) {
  double needed = 0;
  for (const auto& tensor : tensors) {
    auto bytes = static_cast<double>(dtype_bytes(tensor.dtype));
    for (const auto extent : tensor.shape) bytes *= static_cast<double>(extent);
    needed += bytes;
  }
  const auto there = static_cast<double>(facts.memory_bytes);
  if (needed > 0x1p62 || (there > 0 && needed > there))
    throw Error(ErrorKind::unavailable,
                fmt::format("{} needs {:.0f} bytes for its tensors, and {} has {:.0f}: use smaller "
                            "sizes",
                            problem.text(), needed, facts.name, there));
}

}  // namespace

TensorLayout::TensorLayout(const Op& op, const Problem& problem, const DeviceFacts& facts)
    : tensors_(op.tensors(problem)) {
  if (tensors_.size() > most_tensors)
    throw Error(ErrorKind::internal, fmt::format("{} has {} tensors: a plan holds {}", op.name(),
                                                 tensors_.size(), most_tensors));
  check_memory(problem, tensors_, facts);
  for (const auto& tensor : tensors_) {
    if (tensor.role != Role::intermediate) {
      ++buffer_count_;
      continue;
    }
    intermediate_offsets_.push_back(scratch_offset_);
    scratch_offset_ += align_up(tensor.bytes());
  }
}

std::size_t TensorLayout::workspace_bytes(std::size_t scratch_bytes) const {
  return scratch_offset_ + align_up(scratch_bytes);
}

void TensorLayout::enqueue(const Executables& executables, void* const* buffers, void* workspace,
                           void* stream) const {
  std::array<void*, most_tensors> addresses;
  std::copy_n(buffers, buffer_count_, addresses.begin());
  auto* const base = static_cast<std::byte*>(workspace);
  for (std::size_t i = 0; i < intermediate_offsets_.size(); ++i)
    addresses[buffer_count_ + i] = base + intermediate_offsets_[i];
  void* const scratch = base ? base + scratch_offset_ : nullptr;
  for (const auto& executable : executables) executable->enqueue(addresses.data(), scratch, stream);
}

std::size_t scratch_bytes(const Executables& executables) {
  std::size_t most = 0;
  for (const auto& executable : executables) most = std::max(most, executable->workspace_bytes());
  return most;
}

void check_recipe(const Op& op, const Problem& problem, const DeviceFacts& facts,
                  const Recipe& recipe) {
  const auto stages = op.stages(problem);
  std::size_t covered = 0;
  for (const auto& variant : recipe) {
    if (const auto reason = illegality(op, problem, facts, variant); !reason.empty())
      throw Error(ErrorKind::invalid_input,
                  fmt::format("{} cannot run on {}: {}", problem.text(), facts.name, reason));
    for (const auto& stage : family_of(op, variant.family).stages()) {
      if (covered == stages.size() || stages[covered].name != stage)
        throw Error(ErrorKind::invalid_input,
                    fmt::format("{}: '{}' does not cover the stages of {} in order",
                                recipe_text(recipe), variant.id(), problem.text()));
      ++covered;
    }
  }
  if (covered < stages.size())
    throw Error(ErrorKind::invalid_input,
                fmt::format("'{}' leaves out stage '{}' of {}", recipe_text(recipe),
                            stages[covered].name, problem.text()));
}

}  // namespace fftune
