#include "core/config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "core/error.hpp"

namespace fftune {
namespace {

template <typename Entries>
auto find(Entries& entries, std::string_view name) {
  return std::find_if(entries.begin(), entries.end(),
                      [&](const auto& entry) { return entry.first == name; });
}

}  // namespace

Config Config::parse(std::string_view text) {
  Config config;
  while (!text.empty()) {
    const auto part = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), part.size() + 1));
    const auto equals = part.find('=');
    const auto digits = equals == part.npos ? std::string_view() : part.substr(equals + 1);
    std::int64_t value = 0;
    const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (equals == 0 || digits.empty() || code != std::errc() ||
        end != digits.data() + digits.size())
      throw Error(ErrorKind::invalid_input,
                  fmt::format("'{}' is not a parameter: write name=integer", part));
    config.set(part.substr(0, equals), value);
  }
  return config;
}

std::int64_t Config::at(std::string_view name) const {
  const auto entry = find(entries_, name);
  if (entry == entries_.end())
    throw Error(ErrorKind::internal, fmt::format("no parameter '{}' in '{}'", name, text()));
  return entry->second;
}

bool Config::contains(std::string_view name) const {
  return find(entries_, name) != entries_.end();
}

void Config::set(std::string_view name, std::int64_t value) {
  const auto entry = find(entries_, name);
  if (entry == entries_.end())
    entries_.emplace_back(name, value);
  else
    entry->second = value;
}

std::string Config::text() const {
  std::string text;
  for (const auto& [name, value] : entries_)
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", name, value);
  return text;
}

}  // namespace fftune
