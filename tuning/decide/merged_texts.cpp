#include "tuning/decide/merged_texts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace fftune {
namespace {

/// A text as what stands between its numbers, and these.
struct Numbered {
  std::vector<std::string> between = {""};                        // one more than numbers
  std::vector<std::pair<std::string, std::string>> numbers = {};  // the least and the largest
};

bool is_digit(char letter) {
  return letter >= '0' && letter <= '9';
}

/// Characters of the number that stands by itself at `begin`: 0 if none does.
std::size_t number_length(std::string_view text, std::size_t begin) {
  if (begin > 0 && text[begin - 1] != ' ' && text[begin - 1] != '(') return 0;
  std::size_t end = begin;
  while (end < text.size() && is_digit(text[end])) ++end;
  if (end == begin) return 0;
  if (end + 1 < text.size() && text[end] == '.' && is_digit(text[end + 1]))
    for (++end; end < text.size() && is_digit(text[end]);) ++end;
  // As of a percentage and a ratio.
  const bool has_sign = end < text.size() && (text[end] == '%' || text[end] == 'x');
  const std::size_t next = end + (has_sign ? 1 : 0);
  constexpr std::string_view ends = " ,;:)";
  return next == text.size() || ends.find(text[next]) != ends.npos ? end - begin : 0;
}

Numbered numbered(const std::string& text) {
  Numbered result;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = number_length(text, i);
    if (length == 0) {
      result.between.back() += text[i++];
      continue;
    }
    const std::string number = text.substr(i, length);
    result.numbers.emplace_back(number, number);
    result.between.emplace_back();
    i += length;
  }
  return result;
}

double value_of(const std::string& number) {
  return std::strtod(number.c_str(), nullptr);
}

std::string text_of(const Numbered& merged) {
  std::string text = merged.between.front();
  for (std::size_t i = 0; i < merged.numbers.size(); ++i) {
    const auto& [least, largest] = merged.numbers[i];
    text += least == largest ? least : fmt::format("{} to {}", least, largest);
    text += merged.between[i + 1];
  }
  return text;
}

}  // namespace

std::vector<MergedText> merged_texts(const std::vector<std::string>& texts) {
  std::vector<std::pair<Numbered, std::vector<std::size_t>>> found;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    Numbered own = numbered(texts[i]);
    const auto same = std::find_if(found.begin(), found.end(), [&](const auto& each) {
      return each.first.between == own.between;
    });
    if (same == found.end()) {
      found.push_back({std::move(own), {i}});
      continue;
    }
    same->second.push_back(i);
    for (std::size_t n = 0; n < own.numbers.size(); ++n) {
      auto& [least, largest] = same->first.numbers[n];
      const std::string& number = own.numbers[n].first;
      if (value_of(number) < value_of(least)) least = number;
      if (value_of(number) > value_of(largest)) largest = number;
    }
  }
  std::vector<MergedText> merged;
  for (auto& [text, from] : found) merged.push_back({text_of(text), std::move(from)});
  return merged;
}

}  // namespace fftune
