// Suggestions for a word that names nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fftune {

namespace nearest_detail {

inline std::string lower_case(std::string_view text) {
  std::string lower(text);
  for (char& letter : lower)
    if (letter >= 'A' && letter <= 'Z') letter += 'a' - 'A';
  return lower;
}

// Levenshtein's distance, one row at a time.
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({changed, row[j] + 1, row[j - 1] + 1}));
    }
  }
  return row.back();
}

}  // namespace nearest_detail

/// The nearest of `choices` to `given` by edits, upper and lower case being the same, or an empty
/// string where none is near: a third of the word may be wrong, and any word may be cut short.
inline std::string nearest(std::string_view given, const std::vector<std::string>& choices) {
  const std::string word = nearest_detail::lower_case(given);
  std::string best;
  // A third of the word may be wrong, and any word may be cut short.
  std::size_t best_distance = std::max<std::size_t>(1, word.size() / 3) + 1;
  for (const std::string& choice : choices) {
    const bool cut_short = word.size() >= 2 && choice.rfind(word, 0) == 0;
    const std::size_t distance = cut_short ? 0 : nearest_detail::edit_distance(word, choice);
    if (distance < best_distance) {
      best_distance = distance;
      best = choice;
    }
  }
  return best;
}

}  // namespace fftune
