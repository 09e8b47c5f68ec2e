#include "runtime/recipe_executables.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "core/error.hpp"
#include "device/placed_executable.hpp"
#include "registry/catalog.hpp"
#include "registry/repeated_family.hpp"

namespace fftune {
namespace {

/// Makes the program one that a plan can begin with: its first kernel, which may load weights
/// before it waits, would overtake what wrote them.
void launch_normally(Program& program) {
  if (program.steps.empty()) return;
  if (auto* launch = std::get_if<KernelLaunch>(&program.steps.front()))
    launch->programmatic = false;
}

}  // namespace

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

Executables executables_of(const Op& op, const Problem& problem, const DeviceFacts& facts,
                           const Recipe& recipe, const MakeExecutable& make) {
  const auto made = [&](const Variant& variant, bool first) {
    Program program = family_of(op, variant.family).program(problem, facts, variant.config);
    if (first) launch_normally(program);
    return make(variant, program);
  };
  // Parts of an op do not know what comes first.
  const bool composed = !op.parts(problem).empty();
  Executables executables;
  for (const auto& variant : recipe)
    executables.push_back(made(variant, composed && executables.empty()));
  const auto repetition = op.repetition(problem);
  if (!repetition || is_repeated_by_family(op, recipe)) return executables;
  const auto first = executables.front();
  if (composed) executables.front() = made(recipe.front(), false);
  return repeated(executables, repetition->places, first);
}

std::size_t scratch_bytes(const Executables& executables) {
  std::size_t most = 0;
  for (const auto& executable : executables) most = std::max(most, executable->workspace_bytes());
  return most;
}

}  // namespace fftune
