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

/// Null if the program begins with another step.
KernelLaunch* first_launch(Program& program) {
  return program.steps.empty() ? nullptr : std::get_if<KernelLaunch>(&program.steps.front());
}

/// Whether the stages that a variant covers write one of the tensors.
bool writes_any(const Op& op, const Problem& problem, const Variant& variant,
                const std::vector<TensorArgument>& tensors) {
  if (tensors.empty()) return false;
  const auto covered = family_of(op, variant.family).stages();
  const auto specs = op.tensors(problem);
  for (const StageSpec& stage : op.stages(problem)) {
    if (std::find(covered.begin(), covered.end(), stage.name) == covered.end()) continue;
    for (const TensorArgument& tensor : tensors)
      if (std::find(stage.outputs.begin(), stage.outputs.end(), specs.at(tensor.tensor).name) !=
          stage.outputs.end())
        return true;
  }
  return false;
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

Program program_in(const Recipe& recipe, std::size_t place, const Op& op, const Problem& problem,
                   const DeviceFacts& facts) {
  const Variant& variant = recipe[place];
  Program program = family_of(op, variant.family).program(problem, facts, variant.config);
  const KernelLaunch* const launch = first_launch(program);
  if (place > 0 && launch != nullptr &&
      writes_any(op, unrepeated(op, problem), recipe[place - 1], launch->read_early))
    launch_normally(program);
  return program;
}

void launch_normally(Program& program) {
  if (KernelLaunch* const launch = first_launch(program)) launch->programmatic = false;
}

Executables executables_of(const Op& op, const Problem& problem, const DeviceFacts& facts,
                           const Recipe& recipe, const MakeExecutable& make) {
  // Parts of an op do not know the kernels before them.
  const bool composed = !op.parts(problem).empty();
  const auto made = [&](std::size_t place, bool begins_plan) {
    Program program = program_in(recipe, place, op, problem, facts);
    if (begins_plan) launch_normally(program);
    return make(recipe[place], program);
  };
  Executables executables;
  for (std::size_t place = 0; place < recipe.size(); ++place)
    executables.push_back(made(place, composed && place == 0));
  const auto repetition = op.repetition(problem);
  if (!repetition || is_repeated_by_family(op, recipe)) return executables;
  const auto first = executables.front();
  if (composed) executables.front() = made(0, false);
  return repeated(executables, repetition->places, first);
}

std::size_t scratch_bytes(const Executables& executables) {
  std::size_t most = 0;
  for (const auto& executable : executables) most = std::max(most, executable->workspace_bytes());
  return most;
}

}  // namespace fftune
