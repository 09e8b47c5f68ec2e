#include "tuning/journal/outcome.hpp"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "core/error.hpp"

namespace fftune {
namespace {

constexpr std::array<std::pair<OutcomeKind, std::string_view>, 11> names{{
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
}};

}  // namespace

std::string_view outcome_kind_name(OutcomeKind kind) {
  for (const auto& [known, name] : names)
    if (known == kind) return name;
  throw Error(ErrorKind::internal, "an outcome without a name");
}

OutcomeKind parse_outcome_kind(std::string_view name) {
  for (const auto& [kind, known] : names)
    if (known == name) return kind;
  throw Error(ErrorKind::invalid_input, fmt::format("'{}' is no kind of outcome", name));
}

}  // namespace fftune
