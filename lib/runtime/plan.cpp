#include "runtime/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "core/error.hpp"

namespace fftune {
namespace {

/// run() keeps the tensors' addresses on its stack.
constexpr std::size_t most_tensors = 32;
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

/// Every stage is covered once, in order, by variants that are legal here.
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

}  // namespace

Plan::Plan(Backend& backend, const Op& op, Problem problem, Recipe recipe)
    : op_(&op),
      problem_(std::move(problem)),
      recipe_(std::move(recipe)),
      tensors_(op.tensors(problem_)) {
  const DeviceFacts& facts = backend.facts();
  if (tensors_.size() > most_tensors)
    throw Error(ErrorKind::internal, fmt::format("{} has {} tensors: a plan holds {}", op.name(),
                                                 tensors_.size(), most_tensors));
  check_memory(problem_, tensors_, facts);
  check_recipe(op, problem_, facts, recipe_);

  for (const auto& tensor : tensors_) {
    if (tensor.role != Role::intermediate) {
      ++buffer_count_;
      continue;
    }
    intermediate_offsets_.push_back(scratch_offset_);
    scratch_offset_ += align_up(tensor.bytes());
  }
  std::size_t scratch_bytes = 0;
  for (const auto& variant : recipe_) {
    const Family& family = family_of(op, variant.family);
    auto compiled = backend.compile(family.program(problem_, facts, variant.config));
    if (!compiled.executable)
      throw Error(ErrorKind::unavailable,
                  fmt::format("{} does not compile for {}: {}", variant.id(), facts.name,
                              compiled.report.failure));
    scratch_bytes = std::max(scratch_bytes, compiled.executable->workspace_bytes());
    executables_.push_back(std::move(compiled.executable));
  }
  workspace_bytes_ = scratch_offset_ + align_up(scratch_bytes);
}

void Plan::run(void* const* buffers, void* workspace, void* stream) const {
  std::array<void*, most_tensors> addresses;
  std::copy_n(buffers, buffer_count_, addresses.begin());
  auto* const base = static_cast<std::byte*>(workspace);
  for (std::size_t i = 0; i < intermediate_offsets_.size(); ++i)
    addresses[buffer_count_ + i] = base + intermediate_offsets_[i];
  void* const scratch = base ? base + scratch_offset_ : nullptr;
  for (const auto& executable : executables_)
    executable->enqueue(addresses.data(), scratch, stream);
}

}  // namespace fftune
