#include "core/problem.hpp"

#include <fmt/format.h>

#include "core/error.hpp"

namespace fftune {

std::int64_t Problem::size(std::string_view name) const {
  const auto entry = sizes.find(std::string(name));
  if (entry == sizes.end())
    throw Error(ErrorKind::invalid_input,
                fmt::format("problem '{}' has no size '{}'", text(), name));
  return entry->second;
}

const std::string& Problem::option(std::string_view name) const {
  const auto entry = options.find(std::string(name));
  if (entry == options.end())
    throw Error(ErrorKind::invalid_input,
                fmt::format("problem '{}' has no option '{}'", text(), name));
  return entry->second;
}

bool Problem::has(std::string_view option, std::string_view value) const {
  const auto entry = options.find(std::string(option));
  return entry != options.end() && entry->second == value;
}

Problem Problem::with_size(std::string_view name, std::int64_t value) const {
  Problem copy = *this;
  copy.sizes[std::string(name)] = value;
  return copy;
}

std::string Problem::text() const {
  std::string text = fmt::format("{}/{} {}", op, pass, dtype_name(dtype));
  for (const auto& [name, value] : options) text += fmt::format(" {}={}", name, value);
  for (const auto& [name, value] : sizes) text += fmt::format(" {}={}", name, value);
  return text;
}

}  // namespace fftune
