// Texts that say the same of several numbers, as one.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace fftune {

struct MergedText {
  std::string text;               // "other processes use 1.4 to 2 of its 2 cores"
  std::vector<std::size_t> from;  // places among the texts given
};

/// Texts that differ in numbers alone become one, with the range of each number; in the order of
/// the first of each. Numbers in names and ids, as in "rows=2", do not count.
std::vector<MergedText> merged_texts(const std::vector<std::string>& texts);

}  // namespace fftune
