#include "device/sources.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "core/error.hpp"
#include "core/hash.hpp"

namespace fftune {
namespace {

/// The names in `#include "..."` lines.
std::vector<std::string> quoted_includes(std::string_view text) {
  std::vector<std::string> names;
  constexpr std::string_view directive = "#include \"";
  for (auto at = text.find(directive); at != text.npos; at = text.find(directive, at + 1)) {
    const bool starts_line = at == 0 || text[at - 1] == '\n';
    const auto begin = at + directive.size();
    const auto end = text.find('"', begin);
    if (starts_line && end != text.npos) names.emplace_back(text.substr(begin, end - begin));
  }
  return names;
}

}  // namespace

const std::string& SourceSet::text(std::string_view file) const {
  const auto entry = files_.find(std::string(file));
  if (entry == files_.end())
    throw Error(ErrorKind::internal, fmt::format("no embedded source '{}'", file));
  return entry->second;
}

std::vector<std::string> SourceSet::closure(std::string_view file) const {
  std::set<std::string> seen;
  std::vector<std::string> open{std::string(file)};
  while (!open.empty()) {
    const std::string name = open.back();
    open.pop_back();
    if (name != file && !seen.insert(name).second) continue;
    for (auto& include : quoted_includes(text(name))) {
      const bool follow = include.ends_with(".cuh") || files_.contains(include);
      if (follow && include != file && !seen.contains(include)) open.push_back(std::move(include));
    }
  }
  std::vector<std::string> closure{std::string(file)};
  closure.insert(closure.end(), seen.begin(), seen.end());
  return closure;
}

std::string SourceSet::hash(const std::vector<std::string>& files) const {
  std::set<std::string> all;
  for (const auto& file : files)
    all.merge([&] {
      const auto names = closure(file);
      return std::set<std::string>(names.begin(), names.end());
    }());
  std::uint64_t state = fnv1a_offset;
  for (const auto& file : all) {
    state = fnv1a(file, state);
    state = fnv1a(std::string_view("\0", 1), state);
    state = fnv1a(text(file), state);
    state = fnv1a(std::string_view("\0", 1), state);
  }
  return hex(state);
}

}  // namespace fftune
