#include "apps/fftune/command_line/values.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "core/error.hpp"
#include "core/nearest.hpp"
#include "core/split.hpp"

namespace fftune::tool {

namespace {

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorKind::invalid_input, message);
}

template <typename Number>
bool parse_number(std::string_view text, Number& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// std::from_chars for double is not in every libstdc++ and libc++ that must serve; a number here
// is digits with one point and one exponent at most, so stod() cannot meet "inf" or hexadecimal.
bool parse_real(const std::string& text, double& value) {
  if (text.empty() || text.find_first_not_of("0123456789.e+") != std::string::npos ||
      text.find_first_of("0123456789") != 0)
    return false;
  try {
    std::size_t used = 0;
    value = std::stod(text, &used);
    return used == text.size();
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

std::int64_t parse_whole(const std::string& text, const std::string& where, std::int64_t least,
                         std::int64_t most) {
  std::int64_t value = 0;
  const std::size_t sign = text.rfind('-', 0) == 0 ? 1 : 0;
  const bool digits =
      text.size() > sign && text.find_first_not_of("0123456789", sign) == std::string::npos;
  if (!digits)
    fail(fmt::format("{} '{}' is not a whole number: give one from {} to {}", where, text, least,
                     most));
  if (!parse_number(text, value) || value < least || value > most)
    fail(fmt::format("{} {} is out of range: give a number from {} to {}", where, text, least,
                     most));
  return value;
}

std::vector<std::string> parse_words(const std::string& text, const std::string& where) {
  std::vector<std::string> words;
  for (const std::string_view word : split_at_commas(text)) {
    if (word.empty())
      fail(fmt::format("{} '{}' has an empty part: give values with commas between them", where,
                       text));
    words.emplace_back(word);
  }
  return words;
}

std::vector<std::int64_t> parse_whole_list(const std::string& text, const std::string& where,
                                           std::int64_t least, std::int64_t most) {
  std::vector<std::int64_t> values;
  for (const std::string& word : parse_words(text, where))
    values.push_back(parse_whole(word, where, least, most));
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

void check_choice(const std::string& text, const std::string& where,
                  const std::vector<std::string>& choices) {
  if (std::find(choices.begin(), choices.end(), text) != choices.end()) return;
  fail(fmt::format("{} '{}' is unknown{}: give one of {}", where, text, near_word(text, choices),
                   fmt::join(choices, ", ")));
}

Reader::Reader(std::string& value)
    : read([&value](const std::string& text, const std::string&) { value = text; }),
      initial(value) {}

Reader::Reader(std::vector<std::string>& values)
    : read([&values](const std::string& text, const std::string&) { values.push_back(text); }),
      repeats(true) {}

Reader whole_list(std::vector<std::int64_t>& values, std::int64_t least, std::int64_t most) {
  return {[&values, least, most](const std::string& text, const std::string& where) {
    values = parse_whole_list(text, where, least, most);
  }};
}

Reader seed(std::uint64_t& value) {
  return {[&value](const std::string& text, const std::string& where) {
            if (!parse_number(text, value))
              fail(fmt::format("{} '{}' is not a seed: give a whole number from 0 to 2^64-1", where,
                               text));
          },
          fmt::format("{}", value)};
}

Reader duration(double& seconds, bool or_none) {
  const auto read = [&seconds, or_none](const std::string& text, const std::string& where) {
    constexpr std::array<std::pair<std::string_view, double>, 4> units{
        {{"ms", 1e-3}, {"s", 1}, {"m", 60}, {"h", 3600}}};
    const std::size_t unit_begin = std::min(text.find_first_not_of("0123456789."), text.size());
    const auto unit = std::find_if(units.begin(), units.end(), [&](const auto& each) {
      return each.first == std::string_view(text).substr(unit_begin);
    });
    if (unit == units.end() || !parse_real(text.substr(0, unit_begin), seconds) ||
        !(seconds > 0 || (or_none && seconds == 0)))
      fail(fmt::format("{} '{}' is not a duration: give one such as 500ms, 60s, 2m or 1h{}", where,
                       text, or_none ? ", or 0s for none" : ""));
    seconds *= unit->second;
  };
  return {read, seconds > 0 ? fmt::format("{}s", seconds) : ""};
}

Reader amount(double& value) {
  return {[&value](const std::string& text, const std::string& where) {
    if (!parse_real(text, value) || !(value > 0) || !std::isfinite(value))
      fail(
          fmt::format("{} '{}' is not an amount: give a number above 0 such as 2e11", where, text));
  }};
}

Reader percent(std::optional<double>& value) {
  return {[&value](const std::string& text, const std::string& where) {
    double given = 0;
    if (!text.ends_with('%') || !parse_real(text.substr(0, text.size() - 1), given) || given > 100)
      fail(fmt::format("{} '{}' is not a percentage: give one such as 1% or 0.5%", where, text));
    value = given / 100;
  }};
}

Reader choice(std::string& value, std::vector<std::string> choices) {
  return {
      [&value, choices = std::move(choices)](const std::string& text, const std::string& where) {
        check_choice(text, where, choices);
        value = text;
      },
      value};
}

Reader words(std::vector<std::string>& values, std::vector<std::string> choices) {
  return {
      [&values, choices = std::move(choices)](const std::string& text, const std::string& where) {
        values = parse_words(text, where);
        for (const std::string& word : values)
          if (!choices.empty()) check_choice(word, where, choices);
      },
      fmt::format("{}", fmt::join(values, ","))};
}

std::string near_word(std::string_view word, const std::vector<std::string>& choices) {
  const std::string near = nearest(word, choices);
  return near.empty() ? "" : fmt::format(" (did you mean {}?)", near);
}

std::string suggestion(std::string_view word, const std::vector<std::string>& choices) {
  const std::string near = nearest(word, choices);
  return near.empty() ? "" : fmt::format(": did you mean {}?", near);
}

}  // namespace fftune::tool
