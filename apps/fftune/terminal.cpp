#include "apps/fftune/terminal.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <string>

namespace fftune::tool {

namespace {

bool continues_code_point(char byte) {
  return (static_cast<unsigned char>(byte) & 0xc0u) == 0x80u;
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

bool is_terminal(std::FILE* stream) {
  return isatty(fileno(stream)) == 1;
}

std::size_t terminal_width(std::FILE* stream) {
  winsize size{};
  if (ioctl(fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 100;
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

}  // namespace fftune::tool
