// Which recipe serves which number of tokens of a layer, for a plan that is run with any.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/choice.hpp"

namespace fftune {

/// One recipe for a range of token counts.
struct TokenSegment {
  std::int64_t first = 1;  // both ends included
  std::int64_t last = 1;
  std::int64_t chosen_at = 1;  // the token count that `choice` was made for
  Choice choice;
  bool each = false;  // every token count has the op's default of its own, not `choice`
};

/// The segments of 1 to `most`'s tokens, in order and without gaps. A choice is made for each token
/// count that a preset of this layer records, and for others where those are more than 4 times
/// apart or where neither of two serves between them. Between two choices the cost model decides
/// where the second takes over; without one, it is their geometric mean. An op whose variants serve
/// single token counts, such as those that are a multiple of a vector, has the segments of its
/// records, and between them one of `each`. `most` must be canonical. Throws the errors of
/// choose().
std::vector<TokenSegment> token_segments(const Catalog& catalog, const Op& op, const Problem& most,
                                         const DeviceFacts& facts, const PresetLibrary& presets);

/// The recipe for `tokens` of the segment: its choice, or the op's default if a constraint excludes
/// this token count.
Recipe recipe_at(const Op& op, const Problem& most, const DeviceFacts& facts,
                 const TokenSegment& segment, std::int64_t tokens);

/// The token counts of a segment whose programs show every kernel that it needs and the most
/// scratch: all up to a bound, and then 128 an octave.
std::vector<std::int64_t> scanned_tokens(const TokenSegment& segment);

}  // namespace fftune
