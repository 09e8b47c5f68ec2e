#include "runtime/tensor_layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/error.hpp"

namespace fftune {
namespace {

std::size_t align_up(std::size_t bytes) {
  constexpr std::size_t alignment = 256;
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

/// For each tensor the one whose memory it shares: an intermediate of a repetition that of the
/// last but one, as those of two neighbours are in use at once.
std::vector<std::size_t> twins_of(const Repetition& repetition,
                                  const std::vector<TensorSpec>& tensors) {
  std::vector<std::size_t> twins(tensors.size());
  for (std::size_t i = 0; i < twins.size(); ++i) twins[i] = i;
  const auto& places = repetition.places;
  for (std::size_t time = 2; time < places.size(); ++time)
    for (std::size_t i = 0; i < places[time].size(); ++i) {
      const std::size_t own = places[time][i], before = places[time - 2][i];
      const bool both =
          tensors[own].role == Role::intermediate && tensors[before].role == Role::intermediate;
      // A tensor that a repetition reads from the one before has its place from there.
      if (both && twins[own] == own && before < own) twins[own] = twins[before];
    }
  return twins;
}

}  // namespace

TensorLayout::TensorLayout(const Op& op, const Problem& problem, const DeviceFacts& facts)
    : tensors_(op.tensors(problem)) {
  if (tensors_.size() > most_tensors)
    throw Error(ErrorKind::internal, fmt::format("{} has {} tensors: a plan holds {}", op.name(),
                                                 tensors_.size(), most_tensors));
  check_memory(problem, tensors_, facts);
  const auto repetition = op.repetition(problem);
  const auto twins = repetition ? twins_of(*repetition, tensors_) : std::vector<std::size_t>();
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].role != Role::intermediate) {
      ++buffer_count_;
      continue;
    }
    const std::size_t twin = twins.empty() ? i : twins[i];
    if (twin != i) {
      intermediate_offsets_.push_back(intermediate_offsets_[twin - buffer_count_]);
      continue;
    }
    intermediate_offsets_.push_back(scratch_offset_);
    scratch_offset_ += align_up(tensors_[i].bytes());
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

}  // namespace fftune
