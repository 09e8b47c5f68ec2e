#include "runtime/choice.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "registry/part_family.hpp"

namespace fftune {
namespace {

std::vector<std::string> stage_names(const Op& op, const Problem& problem) {
  std::vector<std::string> names;
  for (const auto& stage : op.stages(unrepeated(op, problem))) names.push_back(stage.name);
  return names;
}

using Estimates = std::map<std::vector<std::string>, std::optional<double>>;

/// The estimate of each variant, by the stages that it covers.
Estimates estimates_of(const Op& op, const Problem& problem, const DeviceFacts& facts,
                       const Recipe& recipe) {
  Estimates all;
  for (const Variant& variant : recipe) {
    const Family& family = family_of(op, variant.family);
    all[family.stages()] = family.estimate(problem, facts, variant.config);
  }
  return all;
}

/// How many times as long as the default, `by_default`, the record's recipe should take here. Where
/// a family of either has no cost model, both should take the same for its stages.
std::optional<double> misfit(const Op& op, const Problem& problem, const DeviceFacts& facts,
                             const Recipe& recorded, const Recipe& by_default) {
  auto own = estimates_of(op, problem, facts, recorded);
  auto other = estimates_of(op, problem, facts, by_default);
  for (auto [at, end] = std::pair(own.begin(), own.end()); at != end;) {
    const auto same = other.find(at->first);
    if (same == other.end() || (at->second && same->second)) {
      ++at;
      continue;
    }
    other.erase(same);
    at = own.erase(at);
  }
  const auto sum = [](const Estimates& estimates) {
    std::optional<double> seconds = 0;
    for (const auto& [stages, estimate] : estimates)
      seconds = seconds && estimate ? std::optional(*seconds + *estimate) : std::nullopt;
    return seconds;
  };
  const auto own_seconds = sum(own), other_seconds = sum(other);
  if (!own_seconds || !other_seconds || !(*other_seconds > 0)) return std::nullopt;
  return *own_seconds / *other_seconds;
}

/// Why the op's default should be faster than the recipe of a record of another shape; empty: it
/// should not, or nothing tells.
std::string reason_for_default(const Op& op, const Problem& problem, const DeviceFacts& facts,
                               const Recipe& recorded, const Recipe& by_default, bool is_far) {
  const bool is_whole = is_repeated_by_family(op, recorded);
  const bool default_is_whole = is_repeated_by_family(op, by_default);
  if (default_is_whole && !is_whole) return "which should be slower than one launch of the whole";
  if (is_far && is_whole && !default_is_whole)
    return "which is one launch of the whole, and should be slower than its parts";
  const auto times = misfit(op, problem, facts, recorded, by_default);
  if (!times || *times <= most_misfit(is_far)) return "";
  return fmt::format("which should take {:.2f} times as long as the default", *times);
}

}  // namespace

double most_misfit(bool is_far) {
  return is_far ? 1.005 : 1.02;
}

std::optional<double> estimate_of(const Op& op, const Problem& problem, const DeviceFacts& facts,
                                  const Recipe& recipe) {
  double seconds = 0;
  for (const Variant& variant : recipe) {
    const auto own = family_of(op, variant.family).estimate(problem, facts, variant.config);
    if (!own) return std::nullopt;
    seconds += *own;
  }
  return seconds;
}

/// A default that took less than this part of a record's time when both were timed serves in its
/// place; nearer 1 their intervals, which records do not have, may meet.
constexpr double least_untuned_ratio = 0.98;

std::string far_words(const Op& op, const Problem& problem, const Problem& record) {
  constexpr double far_in_tokens = 4, far_in_sizes = 2;
  std::string words;
  const Comparison comparison = comparison_of(op);
  const auto sizes = compared_part(problem, comparison).sizes;
  for (const auto& [name, value] : compared_part(record, comparison).sizes) {
    const auto own = sizes.find(name);
    if (own == sizes.end()) continue;
    const double times = static_cast<double>(own->second) / static_cast<double>(value);
    const double limit = name == op.token_size() ? far_in_tokens : far_in_sizes;
    if (times <= limit && times >= 1 / limit) continue;
    const double ratio = std::max(times, 1 / times);
    const auto number = ratio < 10 ? fmt::format("{:.3g}", ratio) : fmt::format("{:.0f}", ratio);
    words += fmt::format("{}{} is {} the record's", words.empty() ? "" : ", ", name,
                         times > 1 ? number + " times" : "1/" + number + " of");
  }
  return words;
}

std::string record_illegality(const Op& op, const Problem& problem, const DeviceFacts& facts,
                              const PresetRecord& record) {
  std::vector<std::string> covered;
  for (const auto& stage : record.stages) {
    const Family* family = family_if_any(op, stage.variant.family);
    if (family && family->stages() != stage.stages)
      return fmt::format("family '{}' covers {}, not {}", family->name(),
                         fmt::join(family->stages(), " and "), fmt::join(stage.stages, " and "));
    covered.insert(covered.end(), stage.stages.begin(), stage.stages.end());
  }
  if (const auto names = stage_names(op, problem); covered != names)
    return fmt::format("its stages are {}, where {} has {}", fmt::join(covered, ", "), op.name(),
                       fmt::join(names, ", "));
  for (const auto& stage : record.stages)
    if (auto reason = illegality(op, problem, facts, completed(op, problem, facts, stage.variant));
        !reason.empty())
      return reason;
  return "";
}

std::vector<std::string> stale_families(const Catalog& catalog, const Op& op,
                                        const PresetRecord& record) {
  std::vector<std::string> stale;
  for (const auto& stage : record.stages) {
    const Family& family = family_of(op, stage.variant.family);
    if (catalog.sources->hash(family.sources()) != stage.source_hash)
      stale.push_back(stage.variant.family);
  }
  return stale;
}

namespace {

/// The choice for an op that is made of parts.
struct ChoiceOfParts {
  Recipe recipe;
  bool stale = false;
  std::vector<std::string> recorded;  // parts that have a record
};

/// The recipe of what serves each part, and by default the stages that are no part's; empty where
/// what serves a part cannot serve it within the whole, or where no part has a record.
ChoiceOfParts choice_of_parts(const Catalog& catalog, const Op& op, const Problem& problem,
                              const DeviceFacts& facts, const PresetLibrary& presets) {
  ChoiceOfParts whole;
  const auto parts = op.parts(problem);
  const auto has_record = [&](const OpPart& part) {
    const auto illegal = [&](const PresetRecord& record, const Problem& wanted) {
      return record_illegality(*part.op, wanted, facts, record);
    };
    return presets.find(unrepeated(*part.op, part.problem), facts, illegal, comparison_of(*part.op))
        .has_value();
  };
  // Finding the default of each part takes as long as finding that of the whole.
  if (std::none_of(parts.begin(), parts.end(), has_record)) return whole;
  for (const OpPart& part : parts) {
    Choice choice = choose(catalog, *part.op, part.problem, facts, presets);
    if (choice.preset) whole.recorded.push_back(part.name);
    whole.stale = whole.stale || choice.stale;
    for (Variant& variant : choice.recipe) {
      variant.family = part_family_name(part.name, variant.family);
      if (!illegality(op, problem, facts, variant).empty()) return {};
      whole.recipe.push_back(std::move(variant));
    }
  }
  const auto first_stage = [&](const Variant& variant) {
    return family_of(op, variant.family).stages().front();
  };
  // In the order of the stages. The stages of parts have the parts' variants.
  const auto names = stage_names(op, problem);
  std::set<std::string> covered;
  for (const Variant& variant : whole.recipe)
    for (auto& stage : family_of(op, variant.family).stages()) covered.insert(stage);
  if (covered.size() == names.size()) return whole;
  for (Variant& variant : default_recipe(op, problem, facts))
    if (!covered.contains(first_stage(variant))) whole.recipe.push_back(std::move(variant));
  std::sort(whole.recipe.begin(), whole.recipe.end(), [&](const Variant& a, const Variant& b) {
    return std::find(names.begin(), names.end(), first_stage(a)) <
           std::find(names.begin(), names.end(), first_stage(b));
  });
  return whole;
}

}  // namespace

Recipe recorded_in_parts(const Catalog& catalog, const Op& op, const Problem& problem,
                         const DeviceFacts& facts, const PresetLibrary& presets) {
  Recipe recipe;
  for (const OpPart& part : op.parts(unrepeated(op, problem))) {
    const Choice choice = choose(catalog, *part.op, part.problem, facts, presets);
    if (!choice.preset) continue;
    for (const Variant& variant : choice.recipe)
      recipe.push_back({part_family_name(part.name, variant.family), variant.config});
  }
  return recipe;
}

Choice choose(const Catalog& catalog, const Op& op, const Problem& given, const DeviceFacts& facts,
              const PresetLibrary& presets) {
  const Problem problem = unrepeated(op, given);
  const auto illegal = [&](const PresetRecord& record, const Problem& wanted) {
    return record_illegality(op, wanted, facts, record);
  };
  Choice choice;
  const auto comparison = comparison_of(op);
  choice.preset = presets.find(problem, facts, illegal, comparison);
  // Records of the parts serve where none of the whole does, or else the default.
  const auto choose_without = [&](Recipe by_default, const std::string& why) {
    choice.preset.reset();
    ChoiceOfParts of_parts = choice_of_parts(catalog, op, problem, facts, presets);
    choice.recipe = std::move(by_default);
    // A family of the whole should be faster than the best of the parts.
    const bool whole = choice.recipe.size() == 1 && is_repeated_by_family(op, choice.recipe);
    choice.reason = why + ": default of the op";
    if (of_parts.recorded.empty() || whole) return choice;
    choice.recipe = std::move(of_parts.recipe);
    choice.stale = of_parts.stale;
    choice.reason = fmt::format("{}: records of {}", why, fmt::join(of_parts.recorded, ", "));
    return choice;
  };
  if (!choice.preset)
    return choose_without(default_recipe(op, problem, facts),
                          presets.absence(problem, facts, illegal, comparison));
  const auto& record = *choice.preset->record;
  Recipe recorded = completed(op, problem, facts, record.recipe());
  const std::string far = far_words(op, problem, record.problem);
  const auto stale = stale_families(catalog, op, record);
  const bool of_this_device =
      choice.preset->device == DeviceMatch::exact || choice.preset->device == DeviceMatch::alias;
  // Finding the default enumerates the whole space; this device's record of the shape needs none,
  // unless it is one launch as it was: searches time one layer, and models have many.
  const bool was_whole = !stale.empty() && is_repeated_by_family(op, recorded);
  if (!choice.preset->exact_shape || !of_this_device || was_whole) {
    Recipe by_default = default_recipe(op, problem, facts);
    const std::string why =
        of_this_device || stale.empty()
            ? reason_for_default(op, problem, facts, recorded, by_default, !far.empty())
            : fmt::format("made with other sources of {}", fmt::join(stale, " and "));
    if (!why.empty())
      return choose_without(std::move(by_default),
                            fmt::format("{}, {}", choice.preset->reason, why));
  }
  // Where the search itself timed the default as faster, a record is worth less than none.
  if (stale.empty() && record.verdict.untuned_ratio.value_or(1) < least_untuned_ratio)
    return choose_without(
        default_recipe(op, problem, facts),
        fmt::format("{}, timed as slower than the default, which took {:.2f} times as long",
                    choice.preset->reason, *record.verdict.untuned_ratio));
  choice.recipe = std::move(recorded);
  choice.reason = choice.preset->reason;
  choice.far = far;
  if (!far.empty()) choice.reason += fmt::format("; far away: {}", far);
  if (!stale.empty()) {
    choice.stale = true;
    choice.reason += fmt::format("; stale: the sources of {} have changed since it was tuned",
                                 fmt::join(stale, " and "));
  }
  return choice;
}

}  // namespace fftune
