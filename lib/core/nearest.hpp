// Suggestions for a word that names nothing.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fftune {

/// The nearest of `choices` to `word` by edits, upper and lower case being the same, or an empty
/// string where none is near: a third of the word may be wrong, and any word may be cut short.
std::string nearest(std::string_view word, const std::vector<std::string>& choices);

}  // namespace fftune
