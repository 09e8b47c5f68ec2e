#include "core/pattern.hpp"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <utility>

#include "core/problem.hpp"
#include "core/split_mix.hpp"

namespace fftune {
namespace {

constexpr std::array<std::pair<std::string_view, Pattern::Kind>, 4> kinds{
    {{"block", Pattern::Kind::block},
     {"tail", Pattern::Kind::tail},
     {"even", Pattern::Kind::even},
     {"random", Pattern::Kind::random}}};

bool is_uniform(const Pattern& pattern) {
  return pattern.share <= 0 || pattern.share >= 1;
}

}  // namespace

std::optional<Pattern> parse_pattern(std::string_view text) {
  if (text == "all") return Pattern{Pattern::Kind::block, 1};
  if (text == "none") return Pattern{Pattern::Kind::block, 0};
  const auto colon = text.find(':');
  if (colon == text.npos) return std::nullopt;
  const auto share = parse_number(text.substr(colon + 1));
  if (!share || !(*share >= 0 && *share <= 1)) return std::nullopt;
  for (const auto& [name, kind] : kinds)
    if (name == text.substr(0, colon)) return Pattern{kind, *share};
  return std::nullopt;
}

std::string pattern_text(const Pattern& pattern) {
  for (const auto& [name, kind] : kinds)
    if (kind == pattern.kind) return fmt::format("{}:{}", name, pattern.share);
  return "";
}

std::vector<std::uint8_t> draw_pattern(const Pattern& pattern, std::int64_t rows,
                                       std::uint64_t seed) {
  const auto marked = std::llround(pattern.share * static_cast<double>(rows));
  std::vector<std::uint8_t> marks(static_cast<std::size_t>(rows));
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::uint64_t bits = mix(mix(seed) + 0x9e3779b97f4a7c15u * (std::uint64_t(row) + 1));
    bool mark = false;
    switch (pattern.kind) {
      case Pattern::Kind::block:
        mark = row < marked;
        break;
      case Pattern::Kind::tail:
        mark = row >= rows - marked;
        break;
      case Pattern::Kind::even:
        mark = (row + 1) * marked / rows > row * marked / rows;
        break;
      case Pattern::Kind::random:
        mark = static_cast<double>(bits >> 11) * 0x1p-53 < pattern.share;
        break;
    }
    marks[static_cast<std::size_t>(row)] =
        mark ? static_cast<std::uint8_t>(1 + (bits & 0x7ff) % 255) : 0;
  }
  return marks;
}

double pattern_distance(const Pattern& a, const Pattern& b) {
  const bool alike = a.kind == b.kind || is_uniform(a) || is_uniform(b);
  return (std::abs(a.share - b.share) + (alike ? 0 : 1)) / 2;
}

std::vector<std::int64_t> sorted_by_mark(const std::vector<std::uint8_t>& marks) {
  std::vector<std::int64_t> order;
  order.reserve(marks.size());
  for (const bool marked : {true, false})
    for (std::size_t row = 0; row < marks.size(); ++row)
      if ((marks[row] != 0) == marked) order.push_back(static_cast<std::int64_t>(row));
  return order;
}

}  // namespace fftune
