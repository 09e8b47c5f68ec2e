// Text for people: what a terminal shows of it, numbers as they are read, and commands to paste
// into a shell.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "core/memory.hpp"

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

/// The parts of a text that stay whole, each with the space that follows it, if any: words, and the
/// parts of ids of variants, names of devices and paths, but not of options, numbers and intervals.
std::vector<std::string> breakable_parts(const std::string& text);

/// Words of `text` in lines of at most `width` columns; all but the first start at column `indent`.
/// A word that no line has room for is broken into its parts.
std::string wrapped(const std::string& text, std::size_t indent, std::size_t width);

/// "1 file", "2 files".
std::string counted(std::size_t count, std::string_view what);
/// "12.34": microseconds with four significant digits, no unit.
std::string microseconds_text(double microseconds);
/// "83.1%".
std::string percent_text(double fraction);
/// A share of a limit: "83.1%". "above the limit" for more than 105%, which no share can be: the
/// data came from a cache, or the limit was measured while the machine was busy.
std::string limit_share_text(double fraction);
/// "1.23x"; "▼0.87x" below 1, which is seen without colour too.
std::string ratio_text(double ratio);
/// "1.10-1.40x", and "▼0.70-0.85x" where all of it is below 1.
std::string ratio_range_text(double low, double high);
/// "2.1e-03".
std::string error_text(double error);
/// "45s", "2m05s", "1h02m".
std::string seconds_text(double seconds);

/// The text as one word of a shell's line, whatever it holds: as it is where no shell reads
/// anything into it, else in quotes. Control characters and bytes that are not printable are
/// escaped, so that what is seen is what is run: $'a\nb', which bash, zsh and ksh read.
std::string shell_word(std::string_view text);

/// Words that came from a file may hold anything, so each is quoted.
class ShellCommand {
 public:
  explicit ShellCommand(std::vector<std::string> words) : words_(std::move(words)) {}

  ShellCommand& word(std::string text);
  /// "--name value"; "--name=value" where the value could be taken for an option.
  ShellCommand& option(const std::string& name, const std::string& value);

  std::string text() const;

 private:
  std::vector<std::string> words_;
};

}  // namespace fftune::tool
