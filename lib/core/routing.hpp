// Routings in words: how often a mixture's experts are chosen, and test data that follow them.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fftune {

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
