#include "api/describe.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "registry/catalog.hpp"
#include "store/preset_file.hpp"

namespace fftune {
namespace {

using Json = nlohmann::ordered_json;

std::string_view name_of(DeviceMatch match) {
  switch (match) {
    case DeviceMatch::exact:
      return "exact";
    case DeviceMatch::alias:
      return "alias";
    case DeviceMatch::same_arch_and_size:
      return "same architecture and size";
    case DeviceMatch::same_arch:
      return "same architecture";
  }
  return "unknown";
}

Json variants_of(const Plan& plan) {
  Json variants = Json::array();
  for (const auto& variant : plan.recipe()) {
    const Family& family = family_of(plan.op(), variant.family);
    Json parameters = Json::object();
    for (const auto& [name, value] : variant.config.entries())
      parameters[name] = value.is_word() ? Json(value.word()) : Json(value.number());
    variants.push_back({{"stages", family.stages()},
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
          {"problem", Json::parse(problem_json(match.record->problem))},
          {"device_match", name_of(match.device)},
          {"exact_shape", match.exact_shape},
          {"distance", match.distance},
          {"stale", choice.stale}};
}

Json buffers_of(const Plan& plan, const std::vector<std::size_t>& alignments) {
  Json buffers = Json::array();
  for (std::size_t i = 0; i < plan.buffer_count(); ++i) {
    const auto& tensor = plan.tensors()[i];
    buffers.push_back({{"name", tensor.name},
                       {"role", role_name(tensor.role)},
                       {"dtype", dtype_name(tensor.dtype)},
                       {"shape", tensor.shape},
                       {"bytes", tensor.bytes()},
                       {"alignment", alignments[i]}});
  }
  return buffers;
}

}  // namespace

bool runs_fallbacks_alone(const Plan& plan) {
  return std::all_of(plan.recipe().begin(), plan.recipe().end(), [&](const Variant& variant) {
    return family_of(plan.op(), variant.family).is_fallback();
  });
}

std::string describe(const Plan& plan, const DeviceFacts& facts, const Choice& choice,
                     const std::vector<std::size_t>& alignments,
                     const std::vector<std::string>& complaints) {
  const Json description{{"problem", Json::parse(problem_json(plan.problem()))},
                         {"device", {{"name", facts.name}, {"arch", facts.arch}}},
                         {"variants", variants_of(plan)},
                         {"preset", preset_of(choice)},
                         {"reason", choice.reason},
                         {"stale", choice.stale},
                         {"fallback", runs_fallbacks_alone(plan)},
                         {"buffers", buffers_of(plan, alignments)},
                         {"workspace_bytes", plan.workspace_bytes()},
                         {"kept_bytes", kept_bytes(plan.tensors())},
                         {"preset_complaints", complaints}};
  // A path or a device may name itself in bytes that are not UTF-8.
  return description.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace fftune
