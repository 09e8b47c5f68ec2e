// Capabilities of a terminal: colour, width, lines that are drawn again.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace fftune::tool {

enum class Style { plain, bold, dim, good, bad, caution };

/// The text between escape sequences for the style; unchanged if `color` is false.
std::string styled(std::string_view text, Style style, bool color);

bool is_terminal(std::FILE* stream);

/// $COLUMNS, else the columns of the terminal behind `stream`, else `otherwise`; at least 20.
std::size_t terminal_width(std::FILE* stream, std::size_t otherwise = 100);

/// The text on one line, fit for a terminal: control characters, and bytes that are not UTF-8, as
/// "\\x1b". For whatever comes from files, arguments and devices.
std::string shown(std::string_view text);

/// Code points of UTF-8 text: its columns, for the letters, µ and × that are printed here.
std::size_t display_width(std::string_view text);

/// The longest beginning of at most `width` columns, ending in "…" where something was cut.
std::string truncated(std::string_view text, std::size_t width);

/// Moves to the start of the line and clears it.
constexpr std::string_view clear_line = "\r\033[K";

/// Words of `text` in lines of at most `width` columns; all but the first start at column `indent`.
std::string wrapped(const std::string& text, std::size_t indent, std::size_t width);

}  // namespace fftune::tool
