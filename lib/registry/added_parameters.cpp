#include "registry/added_parameters.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <utility>

namespace fftune {
namespace {

struct Addition {
  std::string_view families;  // as fits_family() has it
  std::string_view parameter;
  /// The value that stands for the family without the parameter; nothing: it did what its default
  /// configuration does, which depends on the problem.
  std::optional<std::int64_t> before;
};

constexpr Addition additions[] = {
    {"*_sm90", "a_reuse", 1},
    {"*_sm90", "gather_warps", 2},
    {"*_sm90", "pre_permute", 0},
    {"*_decode", "l2_prefetch", 0},
    {"attention_sm90", "split_keys", 0},
    {"attention_*sm90", "group", std::nullopt},
    {"cpu_*blas", "fused", 0},
    {"*rows", "l2_prefetch", 0},
    {"rows", "vector", std::nullopt},
    {"backward_rows", "keep", 0},
    {"backward_rows", "l2_prefetch_rows", 0},
};

const Addition* addition_of(std::string_view family, std::string_view parameter) {
  const auto row =
      std::find_if(std::begin(additions), std::end(additions), [&](const Addition& addition) {
        return addition.parameter == parameter && fits_family(addition.families, family);
      });
  return row == std::end(additions) ? nullptr : &*row;
}

}  // namespace

bool fits_family(std::string_view pattern, std::string_view family) {
  if (const auto dot = family.rfind('.'); dot != family.npos) family.remove_prefix(dot + 1);
  const auto star = pattern.find('*');
  if (star == pattern.npos) return pattern == family;
  const auto before = pattern.substr(0, star), after = pattern.substr(star + 1);
  return family.size() >= before.size() + after.size() && family.starts_with(before) &&
         family.ends_with(after);
}

Variant completed(const Op& op, const Problem& problem, const DeviceFacts& facts, Variant variant) {
  const auto families = op.families();
  const auto found = std::find_if(families.begin(), families.end(), [&](const Family* family) {
    return family->name() == variant.family;
  });
  // A space may be large to build: most variants lack nothing that was ever added.
  const bool may_lack =
      std::any_of(std::begin(additions), std::end(additions), [&](const Addition& addition) {
        return fits_family(addition.families, variant.family) &&
               !variant.config.contains(addition.parameter);
      });
  if (!may_lack || found == families.end() || (*found)->device_kind() != facts.kind ||
      (*found)->refusal(problem, facts))
    return variant;
  const Family& family = **found;
  const Space space = family.space(problem, facts);
  Config whole;  // in the order of the space, as variants that are enumerated have it
  bool added = false;
  for (const Parameter& parameter : space.parameters()) {
    if (variant.config.contains(parameter.name)) {
      whole.set(parameter.name, variant.config.value(parameter.name));
      continue;
    }
    const Addition* const addition = addition_of(variant.family, parameter.name);
    if (addition == nullptr) return variant;
    if (addition->before)
      whole.set(parameter.name, *addition->before);
    else
      whole.set(parameter.name, family.default_config(problem, facts).value(parameter.name));
    added = true;
  }
  if (!added) return variant;
  for (const auto& [name, value] : variant.config.entries()) whole.set(name, value);
  return {std::move(variant.family), std::move(whole)};
}

Recipe completed(const Op& op, const Problem& problem, const DeviceFacts& facts, Recipe recipe) {
  for (Variant& variant : recipe) variant = completed(op, problem, facts, std::move(variant));
  return recipe;
}

}  // namespace fftune
