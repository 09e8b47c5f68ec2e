// The parts of a text between commas.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

namespace fftune {

/// At least one; parts may be empty. They are views of the text.
inline std::vector<std::string_view> split_at_commas(std::string_view text) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = std::min(text.find(','), text.size());
    parts.push_back(text.substr(0, end));
    if (end == text.size()) return parts;
    text.remove_prefix(end + 1);
  }
}

}  // namespace fftune
