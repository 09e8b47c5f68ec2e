#include "registry/catalog.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include "core/error.hpp"

namespace fftune {
namespace {

/// Covers an op's stages in order with the first families that do not refuse, taking a choice back
/// where it leaves a later stage without one.
class Cover {
 public:
  Cover(const Op& op, const Problem& problem, const DeviceFacts& facts, bool fallback_only,
        std::string_view without = {})
      : op_(op),
        problem_(problem),
        facts_(facts),
        fallback_only_(fallback_only),
        without_(without) {
    for (const auto& stage : op.stages(unrepeated(op, problem))) stages_.push_back(stage.name);
  }

  Recipe recipe() {
    if (!from(0) && !without_.empty()) return {};
    if (recipe_.empty())
      throw Error(ErrorKind::unavailable,
                  fmt::format("no family can run stage '{}' of {} on {}{}", stages_[furthest_],
                              problem_.text(), facts_.name, refusals_[furthest_]));
    return std::move(recipe_);
  }

 private:
  bool fits(const Family& family, std::size_t done) const {
    const auto own = family.stages();
    return family.device_kind() == facts_.kind && family.name() != without_ &&
           (!fallback_only_ || family.is_fallback()) && !own.empty() &&
           done + own.size() <= stages_.size() &&
           std::equal(own.begin(), own.end(), stages_.begin() + static_cast<std::ptrdiff_t>(done));
  }

  bool from(std::size_t done) {
    if (done == stages_.size()) return true;
    furthest_ = std::max(furthest_, done);
    refusals_[done].clear();
    for (const Family* family : op_.families()) {
      if (!fits(*family, done)) continue;
      if (const auto refusal = family->refusal(problem_, facts_)) {
        refusals_[done] += fmt::format("; {}: {}", family->name(), *refusal);
        continue;
      }
      if (!family->is_preferred(problem_, facts_)) continue;
      recipe_.push_back({std::string(family->name()), family->default_config(problem_, facts_)});
      if (from(done + family->stages().size())) return true;
      recipe_.pop_back();
    }
    return false;
  }

  const Op& op_;
  const Problem& problem_;
  const DeviceFacts& facts_;
  bool fallback_only_;
  std::string_view without_;  // a family
  std::vector<std::string> stages_;
  Recipe recipe_;
  std::size_t furthest_ = 0;  // the last stage that could be reached
  std::map<std::size_t, std::string> refusals_;
};

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

const Family* family_if_any(const Op& op, std::string_view name) {
  const auto families = op.families();
  const auto found = std::find_if(families.begin(), families.end(),
                                  [&](const Family* family) { return family->name() == name; });
  return found == families.end() ? nullptr : *found;
}

const Family& family_of(const Op& op, std::string_view name) {
  if (const Family* const family = family_if_any(op, name)) return *family;
  std::vector<std::string_view> names;
  for (const Family* family : op.families()) names.push_back(family->name());
  throw Error(ErrorKind::invalid_input, fmt::format("{} has no family '{}': there is {}", op.name(),
                                                    name, fmt::join(names, ", ")));
}

std::string illegality(const Op& op, const Problem& problem, const DeviceFacts& facts,
                       const Variant& variant) {
  const Family* const family = family_if_any(op, variant.family);
  if (family == nullptr) return fmt::format("there is no family '{}'", variant.family);
  if (family->device_kind() != facts.kind)
    return fmt::format("family '{}' is for another kind of device", variant.family);
  if (const auto refusal = family->refusal(problem, facts)) return *refusal;
  const auto violations = family->space(problem, facts).violations(variant.config);
  return violations.empty() ? "" : fmt::format("{}: {}", variant.id(), violations.front());
}

Variant completed(const Op& op, const Problem& problem, const DeviceFacts& facts, Variant variant) {
  const Family* const family = family_if_any(op, variant.family);
  if (family == nullptr || family->device_kind() != facts.kind || family->refusal(problem, facts))
    return variant;
  return {std::move(variant.family), family->space(problem, facts).completed(variant.config)};
}

Recipe completed(const Op& op, const Problem& problem, const DeviceFacts& facts, Recipe recipe) {
  for (Variant& variant : recipe) variant = completed(op, problem, facts, std::move(variant));
  return recipe;
}

Recipe default_recipe(const Op& op, const Problem& problem, const DeviceFacts& facts) {
  return Cover(op, problem, facts, false).recipe();
}

Recipe default_recipe_without(const Op& op, const Problem& problem, const DeviceFacts& facts,
                              std::string_view family) {
  return Cover(op, problem, facts, false, family).recipe();
}

Recipe fallback_recipe(const Op& op, const Problem& problem, const DeviceFacts& facts) {
  return Cover(op, problem, facts, true).recipe();
}

}  // namespace fftune
