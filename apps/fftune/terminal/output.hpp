// Where a command's words go: results to stdout, as text or as one JSON document; the log and the
// progress to stderr.
#pragma once

#include <string>
#include <string_view>

#include "apps/fftune/terminal/text_table.hpp"
#include "runtime/environment.hpp"
#include "store/json.hpp"

namespace fftune::tool {

/// The flags that every command has.
struct OutputFlags {
  bool json = false;
  bool verbose = false;
  bool quiet = false;
};

/// The text as it is shown on stderr: on a terminal in lines that fit, wrapped between words.
std::string message_text(std::string_view text);

/// Text on stdout as it is. Throws Error(io) if it cannot be written whole.
void print(std::string_view text);

class Output {
 public:
  Output(const OutputFlags& flags, const Environment& environment);

  bool json() const { return flags_.json; }
  bool verbose() const { return flags_.verbose; }
  bool quiet() const { return flags_.quiet; }
  /// Whether stderr is a terminal that lines can be drawn again on.
  bool live() const { return live_; }

  /// One line, and a table, on stdout; nothing with --json.
  void line(std::string_view text) const;
  void heading(std::string_view text) const;
  void table(const TextTable& table) const;
  /// The one JSON document, on stdout; nothing without --json.
  void document(const JsonValue& document) const;

 private:
  OutputFlags flags_;
  bool color_;
  bool live_;
};

/// -q: errors alone; -v: everything; else notes and warnings.
void start_log(const Output& output, bool no_color);

}  // namespace fftune::tool
