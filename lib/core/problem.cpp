#include "core/problem.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <system_error>

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

double Problem::number(std::string_view name) const {
  const auto& text = option(name);
  if (const auto number = parse_number(text)) return *number;
  throw Error(ErrorKind::invalid_input,
              fmt::format("option {}={} of '{}' is not a number", name, text, this->text()));
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

std::optional<double> parse_number(std::string_view text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end || !std::isfinite(value)) return std::nullopt;
  return value;
}

}  // namespace fftune
