#include "apps/fftune/terminal/output.hpp"

#include <fmt/format.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <cstdio>
#include <limits>
#include <memory>
#include <mutex>
#include <string>

#include "apps/fftune/terminal/text.hpp"
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

std::string message_text(std::string_view text) {
  constexpr std::size_t indent = 2;  // of the second line
  const std::string line = shown(text);
  const bool fits = !is_terminal(stderr) || display_width(line) <= terminal_width(stderr);
  return fits ? line : wrapped(line, indent, terminal_width(stderr));
}

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

void Output::document(const JsonValue& document) const {
  if (flags_.json) print(json_page(document));
}

namespace {

class StderrSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  StderrSink(bool live, bool no_color) : terminal_(live), color_(live && !no_color) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    std::string line;
    // A live progress line may stand there; it is drawn again below.
    if (terminal_) line += clear_line;
    const bool is_error = message.level >= spdlog::level::err;
    const std::string_view kind = is_error                               ? "error:"
                                  : message.level == spdlog::level::warn ? "warning:"
                                                                         : "";
    const std::string text =
        message_text(fmt::format("{}{}{}", kind, kind.empty() ? "" : " ",
                                 std::string_view(message.payload.data(), message.payload.size())));
    line += styled(kind, is_error ? Style::bad : Style::caution, color_) +
            text.substr(kind.size()) + "\n";
    std::fwrite(line.data(), 1, line.size(), stderr);
  }
  void flush_() override { std::fflush(stderr); }

 private:
  bool terminal_;
  bool color_;
};

}  // namespace

void start_log(const Output& output, bool no_color) {
  auto logger = std::make_shared<spdlog::logger>(
      "fftune", std::make_shared<StderrSink>(output.live(), no_color));
  logger->set_level(output.quiet()     ? spdlog::level::err
                    : output.verbose() ? spdlog::level::debug
                                       : spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace fftune::tool
