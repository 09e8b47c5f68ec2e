// Patterns of marked rows, in words: what a mask over tokens looks like.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fftune {

/// A share of the rows, from 0 to 1: one block of them at the beginning or at the end, evenly
/// spread (0.5 alternates), or each row by itself at random.
struct Pattern {
  enum class Kind { block, tail, even, random };
  Kind kind = Kind::block;
  double share = 0;

  auto operator<=>(const Pattern&) const = default;
};

/// "block:0.33", "tail:0.5", "even:0.5", "random:0.1"; "all" and "none" are block:1 and block:0.
/// Nothing for any other text.
std::optional<Pattern> parse_pattern(std::string_view text);
/// The inverse, with the share in its shortest form.
std::string pattern_text(const Pattern& pattern);

/// One byte a row, not zero where the row is marked; marks take all values from 1 to 255, because
/// a mask is true wherever it is not zero. The same bytes for the same arguments on every machine.
std::vector<std::uint8_t> draw_pattern(const Pattern& pattern, std::int64_t rows,
                                       std::uint64_t seed);

/// How unlike two patterns are, from 0 to 1: half of the difference of their shares, and a half
/// more between kinds that look different, which are not where nothing or everything is marked.
double pattern_distance(const Pattern& a, const Pattern& b);

/// The rows in the order of their marks: marked rows first, each kind in the order of the rows.
std::vector<std::int64_t> sorted_by_mark(const std::vector<std::uint8_t>& marks);

}  // namespace fftune
