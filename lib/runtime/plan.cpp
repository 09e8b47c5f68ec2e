#include "runtime/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>
#include <variant>

#include "core/error.hpp"
#include "device/placed_executable.hpp"

namespace fftune {
namespace {

/// run() keeps the tensors' addresses on its stack.
constexpr std::size_t most_tensors = 4096;
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
  const auto stages = op.stages(unrepeated(op, problem));
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

/// Makes the program one that a plan can begin with: its first kernel, which may load weights
/// before it waits, would overtake what wrote them.
void launch_normally(Program& program) {
  if (program.steps.empty()) return;
  if (auto* launch = std::get_if<KernelLaunch>(&program.steps.front()))
    launch->programmatic = false;
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
      // What a repetition reads of the one before has its place from there.
      if (both && twins[own] == own && before < own) twins[own] = twins[before];
    }
  return twins;
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

  const auto repetition = op.repetition(problem_);
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
  const auto compile = [&](const Variant& variant, bool first) {
    Program program = family_of(op, variant.family).program(problem_, facts, variant.config);
    if (first) launch_normally(program);
    auto compiled = backend.compile(program);
    if (!compiled.executable)
      throw Error(ErrorKind::unavailable,
                  fmt::format("{} does not compile for {}: {}", variant.id(), facts.name,
                              compiled.report.failure));
    return std::move(compiled.executable);
  };
  // Parts of an op do not know what comes first.
  const bool composed = !op.parts(problem_).empty();
  for (const auto& variant : recipe_)
    executables_.push_back(compile(variant, composed && executables_.empty()));
  if (repetition) {
    const auto first = executables_.front();
    if (composed) executables_.front() = compile(recipe_.front(), false);
    executables_ = repeated(executables_, repetition->places, first);
  }
  std::size_t scratch_bytes = 0;
  for (const auto& executable : executables_)
    scratch_bytes = std::max(scratch_bytes, executable->workspace_bytes());
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
