#include "runtime/plan.hpp"

#include <fmt/format.h>

#include <utility>

#include "core/error.hpp"
#include "runtime/recipe_executables.hpp"

namespace fftune {

Plan::Plan(Backend& backend, const Op& op, Problem problem, Recipe recipe)
    : op_(&op),
      problem_(std::move(problem)),
      recipe_(std::move(recipe)),
      layout_(op, problem_, backend.facts()) {
  const DeviceFacts& facts = backend.facts();
  check_recipe(op, problem_, facts, recipe_);
  executables_ = executables_of(
      op, problem_, facts, recipe_, [&](const Variant& variant, const Program& program) {
        auto compiled = backend.compile(program);
        if (!compiled.executable)
          throw Error(ErrorKind::unavailable,
                      fmt::format("{} does not compile for {}: {}", variant.id(), facts.name,
                                  compiled.report.failure));
        return std::move(compiled.executable);
      });
  workspace_bytes_ = layout_.workspace_bytes(scratch_bytes(executables_));
}

void Plan::run(void* const* buffers, void* workspace, void* stream) const {
  layout_.enqueue(executables_, buffers, workspace, stream);
}

}  // namespace fftune
