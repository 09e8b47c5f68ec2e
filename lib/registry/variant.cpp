#include "registry/variant.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/error.hpp"

namespace fftune {

std::string Variant::id() const {
  return config.entries().empty() ? family : fmt::format("{}/{}", family, config.text());
}

Variant Variant::parse(std::string_view id) {
  const auto slash = id.find('/');
  if (id.empty() || slash == 0)
    throw Error(ErrorKind::invalid_input,
                fmt::format("'{}' is not a variant: write family/name=value,...", id));
  Variant variant{std::string(id.substr(0, slash)), {}};
  if (slash != id.npos) variant.config = Config::parse(id.substr(slash + 1));
  return variant;
}

std::string recipe_text(const Recipe& recipe) {
  std::string text;
  for (const auto& variant : recipe) text += (text.empty() ? "" : " + ") + variant.id();
  return text;
}

bool same_variants(const Recipe& a, const Recipe& b) {
  const auto same = [](const Variant& one, const Variant& other) {
    return one.family == other.family &&
           std::is_permutation(one.config.entries().begin(), one.config.entries().end(),
                               other.config.entries().begin(), other.config.entries().end());
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

}  // namespace fftune
