#include "apps/fftune/output.hpp"

#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/error.hpp"

namespace fftune::tool {

namespace {

/// A pipe or a file has lines of any length, unless COLUMNS asks for less.
std::size_t page_width() {
  return terminal_width(stdout, std::numeric_limits<std::size_t>::max());
}

/// Spaces within a line that fits stay as they are.
std::string fitted(std::string_view text) {
  const std::string line = shown(text);
  return display_width(line) <= page_width() ? line : wrapped(line, 0, page_width());
}

}  // namespace

void print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
    throw Error(ErrorKind::io,
                "standard output cannot be written: is the disk full or the pipe closed?");
}

Output::Output(const OutputFlags& flags, const Environment& environment)
    : flags_(flags),
      color_(!environment.no_color && is_terminal(stdout)),
      live_(!environment.dumb_terminal && is_terminal(stderr)) {}

void Output::line(std::string_view text) const {
  if (!flags_.json) print(fitted(text).append("\n"));
}

void Output::heading(std::string_view text) const {
  if (!flags_.json) print(styled(fitted(text), Style::bold, color_).append("\n"));
}

void Output::table(const TextTable& table) const {
  if (!flags_.json) print(table.text(color_, page_width()));
}

void Output::document(const nlohmann::ordered_json& document) const {
  // Names of devices and files may hold any bytes: replaced rather than thrown at the very end.
  if (flags_.json)
    print(document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

}  // namespace fftune::tool
