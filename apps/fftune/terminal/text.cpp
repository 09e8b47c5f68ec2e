#include "apps/fftune/terminal/text.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>
#include <string>
#include <utility>

#include "runtime/environment.hpp"
#include "tuning/decide/verdict.hpp"

namespace fftune::tool {

namespace {

bool continues_code_point(char byte) {
  return (static_cast<unsigned char>(byte) & 0xc0u) == 0x80u;
}

/// Bytes of the printable character that the text begins with: 0 for a control character, or a byte
/// that begins none in UTF-8.
std::size_t character_length(std::string_view text) {
  const auto first = static_cast<unsigned char>(text.front());
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
  const std::size_t length = first >= 0xf0 && first < 0xf5   ? 4
                             : first >= 0xe0 && first < 0xf0 ? 3
                             : first >= 0xc2 && first < 0xe0 ? 2
                                                             : 0;
  if (length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if (!continues_code_point(text[i])) return 0;
  if (length < 3) return length;
  // Longer than need be, half of a surrogate pair, or beyond the last code point.
  const auto second = static_cast<unsigned char>(text[1]);
  if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second >= 0xa0) ||
      (first == 0xf0 && second < 0x90) || (first == 0xf4 && second >= 0x90))
    return 0;
  // Characters that reverse the direction of the text could make it show another text than there
  // is; U+FFFE and U+FFFF are no characters, and no XML may have them.
  const std::string_view own = text.substr(0, length);
  const bool turns = (own >= "\u202a" && own <= "\u202e") || (own >= "\u2066" && own <= "\u2069");
  return turns || own == "\xef\xbf\xbe" || own == "\xef\xbf\xbf" ? 0 : length;
}

std::string_view escape_of(Style style) {
  switch (style) {
    case Style::plain:
      break;
    case Style::bold:
      return "\033[1m";
    case Style::dim:
      return "\033[2m";
    case Style::good:
      return "\033[32m";
    case Style::bad:
      return "\033[31m";
    case Style::caution:
      return "\033[33m";
  }
  return "";
}

}  // namespace

std::string styled(std::string_view text, Style style, bool color) {
  if (!color || style == Style::plain || text.empty()) return std::string(text);
  return std::string(escape_of(style)).append(text).append("\033[0m");
}

std::string shown(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = character_length(text.substr(i));
    // C1 controls, U+0080 to U+009F, are of two bytes.
    const bool control =
        length == 2 && text[i] == '\xc2' && static_cast<unsigned char>(text[i + 1]) < 0xa0;
    if (length == 0 || control) {
      for (std::size_t end = i + std::max<std::size_t>(length, 1); i < end; ++i)
        result += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[i]));
    } else {
      result += text.substr(i, length);
      i += length;
    }
  }
  return result;
}

bool is_terminal(std::FILE* stream) {
  return isatty(fileno(stream)) == 1;
}

std::size_t terminal_width(std::FILE* stream, std::size_t otherwise) {
  constexpr std::size_t least = 20;
  if (const std::size_t columns = columns_asked_for(); columns > 0) return std::max(columns, least);
  winsize size{};
  if (ioctl(fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
    return std::max<std::size_t>(size.ws_col, least);
  return otherwise;
}

std::size_t display_width(std::string_view text) {
  std::size_t width = 0;
  for (const char byte : text) width += continues_code_point(byte) ? 0 : 1;
  return width;
}

std::string truncated(std::string_view text, std::size_t width) {
  if (display_width(text) <= width) return std::string(text);
  std::size_t columns = 0;
  std::size_t end = 0;
  for (; end < text.size(); ++end) {
    if (continues_code_point(text[end])) continue;
    if (columns + 1 >= width) break;
    ++columns;
  }
  return std::string(text.substr(0, end)).append(width == 0 ? "" : "…");
}

namespace {

bool is_word_letter(char letter) {
  return (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z');
}

/// In ids of variants and names of devices, but not in options, numbers and intervals.
bool breaks_after(const std::string& text, std::size_t i) {
  if (text[i] == ',' || text[i] == '/' || text[i] == '+' || text[i] == ';') return true;
  return text[i] == '-' && i > 0 && is_word_letter(text[i - 1]) && i + 1 < text.size() &&
         is_word_letter(text[i + 1]);
}

}  // namespace

std::vector<std::string> breakable_parts(const std::string& text) {
  std::vector<std::string> words;
  std::string word;
  for (std::size_t i = 0; i < text.size(); ++i) {
    word += text[i];
    if (text[i] != ' ' && !breaks_after(text, i)) continue;
    words.push_back(std::move(word));
    word.clear();
  }
  if (!word.empty()) words.push_back(std::move(word));
  return words;
}

std::string wrapped(const std::string& text, std::size_t indent, std::size_t width) {
  std::istringstream words(text);
  std::string result;
  std::string word;
  std::size_t column = indent;
  const auto add = [&](const std::string& part, bool behind_space) {
    const std::size_t needed = display_width(part) + (behind_space ? 1 : 0);
    if (column > indent && column + needed > width) {
      result += "\n" + std::string(indent, ' ');
      column = indent;
    } else if (column > indent && behind_space) {
      result += ' ';
      ++column;
    }
    result += part;
    column += display_width(part);
  };
  while (words >> word) {
    if (indent + display_width(word) <= width) {
      add(word, true);
      continue;
    }
    bool first = true;
    for (const std::string& part : breakable_parts(word)) add(part, std::exchange(first, false));
  }
  return result;
}

std::string counted(std::size_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string microseconds_text(double microseconds) {
  if (!std::isfinite(microseconds) || microseconds <= 0) return "-";
  const int digits_before = static_cast<int>(std::floor(std::log10(microseconds))) + 1;
  return fmt::format("{:.{}f}", microseconds, std::clamp(4 - digits_before, 0, 3));
}

std::string percent_text(double fraction) {
  return fmt::format("{:.1f}%", 100 * fraction);
}

std::string limit_share_text(double fraction) {
  return fraction > most_share_of_limit ? "above the limit" : percent_text(fraction);
}

std::string ratio_text(double ratio) {
  // Decided by the printed digits: 0.998 reads as 1.00.
  return fmt::format("{}{:.2f}x", ratio < 0.995 ? "▼" : "", ratio);
}

std::string ratio_range_text(double low, double high) {
  return fmt::format("{}{:.2f}-{:.2f}x", high < 0.995 ? "▼" : "", low, high);
}

std::string error_text(double error) {
  return fmt::format("{:.1e}", error);
}

std::string seconds_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::llround(std::max(0.0, seconds)));
  if (whole < 60) return fmt::format("{}s", whole);
  if (whole < 3600) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  return fmt::format("{}h{:02}m", whole / 3600, whole / 60 % 60);
}

namespace {

/// ASCII, and at the start no letter that a shell expands.
bool is_plain(std::string_view text) {
  constexpr std::string_view others = "_./:@%+=,-";
  return !text.empty() && text.front() != '=' && std::all_of(text.begin(), text.end(), [&](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           others.find(c) != std::string_view::npos;
  });
}

}  // namespace

std::string shell_word(std::string_view text) {
  if (is_plain(text)) return std::string(text);
  std::string word;
  if (shown(text) == text) {
    for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return "'" + word + "'";
  }
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f)
      word += fmt::format("\\x{:02x}", byte);
    else
      word += c == '\'' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    // The next digit is no part of the escape before it.
    if (byte < 0x20 || byte >= 0x7f) word += "'$'";
  }
  return "$'" + word + "'";
}

ShellCommand& ShellCommand::word(std::string text) {
  words_.push_back(std::move(text));
  return *this;
}

ShellCommand& ShellCommand::option(const std::string& name, const std::string& value) {
  if (value.starts_with('-')) return word("--" + name + "=" + value);
  return word("--" + name).word(value);
}

std::string ShellCommand::text() const {
  std::string text;
  for (const std::string& word : words_) text += (text.empty() ? "" : " ") + shell_word(word);
  return text;
}

}  // namespace fftune::tool
