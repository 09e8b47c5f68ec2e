#include "tuning/journal/outcome.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "core/error.hpp"
#include "core/lookup.hpp"

namespace fftune {
namespace {

const Lookup<OutcomeKind, std::string_view> names = {
    {OutcomeKind::measured, "measured"},
    {OutcomeKind::compile_failed, "compile_failed"},
    {OutcomeKind::spilled, "spilled"},
    {OutcomeKind::verify_failed, "verify_failed"},
    {OutcomeKind::launch_failed, "launch_failed"},
    {OutcomeKind::device_fault, "device_fault"},
    {OutcomeKind::crashed, "crashed"},
    {OutcomeKind::killed, "killed"},
    {OutcomeKind::other_bits, "other_bits"},
    {OutcomeKind::quarantined, "quarantined"},
    {OutcomeKind::not_tried, "not_tried"},
};

}  // namespace

std::string_view outcome_kind_name(OutcomeKind kind) {
  return value_of(kind, names);
}

OutcomeKind parse_outcome_kind(std::string_view name) {
  if (const auto kind = find_key(name, names)) return *kind;
  throw Error(ErrorKind::invalid_input, fmt::format("'{}' is not a kind of outcome", name));
}

std::optional<Outcome> first_failure(const std::vector<Outcome>& outcomes) {
  std::set<std::size_t> served;
  for (const Outcome& each : outcomes)
    if (each.kind == OutcomeKind::measured) served.insert(each.first_stage);
  std::optional<Outcome> first;
  for (const Outcome& each : outcomes) {
    if (!each.failed()) continue;
    if (!served.contains(each.first_stage)) return each;
    if (!first) first = each;
  }
  return first;
}

std::string failure_text(const Outcome& outcome) {
  std::string kind(outcome_kind_name(outcome.kind));
  std::replace(kind.begin(), kind.end(), '_', ' ');
  return fmt::format("{}: {}{}{}", outcome.id, kind, outcome.reason.empty() ? "" : ": ",
                     outcome.reason);
}

std::string_view phase_name(Phase phase) {
  using enum Phase;
  return value_of<Phase, std::string_view>(phase, {{setup, "setup"},
                                                   {compile, "compile"},
                                                   {screen, "screen"},
                                                   {semifinals, "semifinals"},
                                                   {finals, "finals"},
                                                   {combine, "combine"},
                                                   {done, "done"}});
}

}  // namespace fftune
