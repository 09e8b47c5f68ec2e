#include "api/describe.hpp"

#include <algorithm>
#include <string_view>

#include "api/handles.hpp"
#include "core/lookup.hpp"
#include "registry/catalog.hpp"
#include "runtime/slower_fallback.hpp"
#include "store/json.hpp"
#include "store/preset_file.hpp"

namespace fftune {
namespace {

using Json = JsonValue;

std::string_view name_of(DeviceMatch match) {
  using enum DeviceMatch;
  return value_of<DeviceMatch, std::string_view>(
      match, {{exact, "exact"},
              {alias, "alias"},
              {same_arch_and_size, "same architecture and size"},
              {same_arch, "same architecture"}});
}

Json variants_of(const Op& op, const Recipe& recipe) {
  Json::Array variants;
  for (const auto& variant : recipe) {
    const Family& family = family_of(op, variant.family);
    Json parameters = Json::Object();
    for (const auto& [name, value] : variant.config.entries())
      parameters[name] = value.is_word() ? Json(value.word()) : Json(value.number());
    variants.push_back(Json{{"stages", family.stages()},
                            {"id", variant.id()},
                            {"family", variant.family},
                            {"parameters", std::move(parameters)},
                            {"fallback", family.is_fallback()}});
  }
  return variants;
}

Json preset_of(const Choice& choice) {
  if (!choice.preset) return nullptr;
  const auto& match = *choice.preset;
  return {{"path", match.path.string()},
          {"problem", parse_json(problem_json(match.record->problem))},
          {"device_match", name_of(match.device)},
          {"exact_shape", match.exact_shape},
          {"distance", match.distance},
          {"far", !choice.far.empty()},
          {"stale", choice.stale}};
}

Json slower_fallback_of(const PlanFacts& plan) {
  const auto found = slower_fallback(*plan.op, *plan.problem, *plan.facts, plan.choice->recipe);
  if (!found) return nullptr;
  return {{"stages", found->stages},
          {"us", 1e6 * found->seconds},
          {"pytorch_us", 1e6 * found->pytorch_seconds}};
}

Json problem_of(const PlanFacts& plan) {
  auto problem = parse_json(problem_json(*plan.problem));
  if (plan.plan->token_plan)
    problem[plan.op->token_size()] = Json{{"max", plan.plan->token_plan->most_tokens()}};
  return problem;
}

Json segments_of(const PlanFacts& plan) {
  Json::Array segments;
  for (const auto& segment : plan.plan->token_plan->segments())
    segments.push_back(Json{{"first", segment.first},
                            {"last", segment.last},
                            {"each", segment.each},
                            {"variants", variants_of(*plan.op, segment.choice.recipe)},
                            {"preset", preset_of(segment.choice)},
                            {"reason", segment.choice.reason},
                            {"stale", segment.choice.stale}});
  return segments;
}

Json buffers_of(const fftune_plan& plan) {
  Json::Array buffers;
  for (std::size_t i = 0; i < plan.buffer_count(); ++i) {
    const auto& tensor = plan.tensors()[i];
    buffers.push_back(Json{{"name", tensor.name},
                           {"role", role_name(tensor.role)},
                           {"dtype", dtype_name(tensor.dtype)},
                           {"shape", tensor.shape},
                           {"bytes", tensor.bytes()},
                           {"alignment", plan.alignments[i]}});
  }
  return buffers;
}

}  // namespace

bool runs_fallbacks_alone(const Op& op, const Recipe& recipe) {
  return std::all_of(recipe.begin(), recipe.end(), [&](const Variant& variant) {
    return family_of(op, variant.family).is_fallback();
  });
}

std::string describe(const PlanFacts& plan) {
  const Choice& choice = *plan.choice;
  Json description{{"problem", problem_of(plan)},
                   {"device", {{"name", plan.facts->name}, {"arch", plan.facts->arch}}},
                   {"variants", variants_of(*plan.op, choice.recipe)},
                   {"preset", preset_of(choice)},
                   {"reason", choice.reason},
                   {"stale", choice.stale},
                   {"fallback", runs_fallbacks_alone(*plan.op, choice.recipe)},
                   {"slower_fallback", slower_fallback_of(plan)},
                   {"buffers", buffers_of(*plan.plan)},
                   {"workspace_bytes", plan.plan->workspace_bytes()},
                   {"kept_bytes", kept_bytes(plan.plan->tensors())},
                   {"warnings", plan.warnings},
                   {"preset_complaints", plan.complaints}};
  if (plan.plan->token_plan) description["segments"] = segments_of(plan);
  return json_page(description);
}

}  // namespace fftune
