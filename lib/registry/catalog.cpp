#include "registry/catalog.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/error.hpp"

namespace fftune {
namespace {

/// Covers the op's stages in order with the first families that `admit` and do not refuse.
Recipe cover(const Op& op, const Problem& problem, const DeviceFacts& facts, bool fallback_only) {
  Recipe recipe;
  std::vector<std::string> names;
  for (const auto& stage : op.stages(problem)) names.push_back(stage.name);
  for (std::size_t done = 0; done < names.size();) {
    const Family* chosen = nullptr;
    std::string refusals;
    for (const Family* family : op.families()) {
      const auto stages = family->stages();
      const bool fits = done + stages.size() <= names.size() &&
                        std::equal(stages.begin(), stages.end(), names.begin() + done);
      if (family->device_kind() != facts.kind || !fits) continue;
      if (fallback_only && !family->is_fallback()) continue;
      if (const auto refusal = family->refusal(problem, facts)) {
        refusals += fmt::format("; {}: {}", family->name(), *refusal);
        continue;
      }
      chosen = family;
      break;
    }
    if (!chosen)
      throw Error(ErrorKind::unavailable,
                  fmt::format("no family can run stage '{}' of {} on {}{}", names[done],
                              problem.text(), facts.name, refusals));
    recipe.push_back({std::string(chosen->name()), chosen->default_config(problem, facts)});
    done += chosen->stages().size();
  }
  return recipe;
}

}  // namespace

const Op& Catalog::op(std::string_view name) const {
  std::vector<std::string_view> names;
  for (const Op* op : ops) {
    if (op->name() == name) return *op;
    names.push_back(op->name());
  }
  throw Error(ErrorKind::invalid_input,
              fmt::format("unknown op '{}': there is {}", name, fmt::join(names, ", ")));
}

const Family& family_of(const Op& op, std::string_view name) {
  std::vector<std::string_view> names;
  for (const Family* family : op.families()) {
    if (family->name() == name) return *family;
    names.push_back(family->name());
  }
  throw Error(ErrorKind::invalid_input, fmt::format("{} has no family '{}': there is {}", op.name(),
                                                    name, fmt::join(names, ", ")));
}

std::string illegality(const Op& op, const Problem& problem, const DeviceFacts& facts,
                       const Variant& variant) {
  const auto families = op.families();
  const auto entry = std::find_if(families.begin(), families.end(), [&](const Family* family) {
    return family->name() == variant.family;
  });
  if (entry == families.end()) return fmt::format("there is no family '{}'", variant.family);
  const Family& family = **entry;
  if (family.device_kind() != facts.kind)
    return fmt::format("family '{}' is for another kind of device", variant.family);
  if (const auto refusal = family.refusal(problem, facts)) return *refusal;
  const auto violations = family.space(problem, facts).violations(variant.config);
  return violations.empty() ? "" : fmt::format("{}: {}", variant.id(), violations.front());
}

Recipe default_recipe(const Op& op, const Problem& problem, const DeviceFacts& facts) {
  return cover(op, problem, facts, false);
}

Recipe fallback_recipe(const Op& op, const Problem& problem, const DeviceFacts& facts) {
  return cover(op, problem, facts, true);
}

}  // namespace fftune
