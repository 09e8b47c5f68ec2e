// Distributions of data that decide how long a kernel takes: the tokens that a mask takes, and the
// experts that tokens choose.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fftune {

// Patterns of marked rows, in words: what a mask over tokens looks like.

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

// Routings in words: how often a mixture's experts are chosen, and test data that follow them.

/// Each token chooses experts without repetition. With skew 0 all are as popular; else the r-th
/// most popular is chosen in proportion to r^-skew (Zipf's law).
struct Routing {
  double skew = 0;
  /// Not empty: the ids are those of this text file instead, the choices of one token after the
  /// other, separated by blanks or commas; over again where there are more tokens.
  std::string file = {};

  auto operator<=>(const Routing&) const = default;
};

/// "uniform", "zipf:1" with a skew from 0 to 4, "file:ids.txt"; nothing for any other text.
std::optional<Routing> parse_routing(std::string_view text);
/// The inverse, with the skew in its shortest form.
std::string routing_text(const Routing& routing);

/// Expert ids [tokens, choices], `choices` <= `experts`: the same for the same arguments on every
/// machine. Which experts are popular depends on the seed. Throws Error(invalid_input) for a file
/// that cannot be read, has no ids of whole tokens, or names an expert that there is not.
std::vector<std::int32_t> draw_routing(const Routing& routing, std::int64_t tokens,
                                       std::int64_t experts, std::int64_t choices,
                                       std::uint64_t seed);

/// About how many of the tokens experts should get: groups of experts that are about as popular,
/// the most popular first. For a file that is not here, as if uniform.
struct ExpertsAlike {
  double experts = 0;
  double tokens = 0;  // of each
};
std::vector<ExpertsAlike> expected_tokens(const Routing& routing, std::int64_t tokens,
                                          std::int64_t experts, std::int64_t choices);

/// How unlike two routings are, from 0 to 1.
double routing_distance(const Routing& a, const Routing& b);

/// The choices of tokens sorted by expert, those of an expert in the order of tokens and choices.
struct SortedRouting {
  std::vector<std::int32_t> offsets;  // [experts + 1]: where each expert's rows begin
  std::vector<std::int32_t> tokens;   // [choices of all tokens]: the token of each sorted row
  std::vector<std::int32_t> places;   // the sorted row of each choice; -1: it has none
};

/// The routing of ids [tokens, choices]. Those outside of [0, experts) are not here and have no
/// row; rows from offsets.back() on are not used, and their tokens 0.
SortedRouting sorted_routing(const std::vector<std::int32_t>& ids, std::int64_t experts,
                             std::int64_t choices);

}  // namespace fftune
