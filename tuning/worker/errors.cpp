#include "tuning/worker/errors.hpp"

#include <fmt/format.h>

#include <array>
#include <utility>

namespace fftune {
namespace {

constexpr std::array<std::pair<ErrorKind, std::string_view>, 5> names{{
    {ErrorKind::invalid_input, "invalid_input"},
    {ErrorKind::unavailable, "unavailable"},
    {ErrorKind::device_fault, "device_fault"},
    {ErrorKind::io, "io"},
    {ErrorKind::internal, "internal"},
}};

}  // namespace

std::string_view error_kind_name(ErrorKind kind) {
  for (const auto& [known, name] : names)
    if (known == kind) return name;
  return "internal";
}

ErrorKind parse_error_kind(std::string_view name) {
  for (const auto& [kind, known] : names)
    if (known == name) return kind;
  throw Error(ErrorKind::invalid_input, fmt::format("'{}' is no kind of error", name));
}

}  // namespace fftune
