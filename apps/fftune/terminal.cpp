#include "apps/fftune/terminal.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "runtime/environment.hpp"

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
  // Characters that turn the text's direction could show another text than there is; U+FFFE and
  // U+FFFF are no characters, and no XML may have them.
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

std::string wrapped(const std::string& text, std::size_t indent, std::size_t width) {
  std::istringstream words(text);
  std::string result;
  std::string word;
  std::size_t column = indent;
  while (words >> word) {
    if (column > indent && column + 1 + display_width(word) > width) {
      result += "\n" + std::string(indent, ' ');
      column = indent;
    } else if (column > indent) {
      result += ' ';
      ++column;
    }
    result += word;
    column += display_width(word);
  }
  return result;
}

}  // namespace fftune::tool
