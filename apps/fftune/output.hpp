// Where a command's words go: results to stdout, as text or as one JSON document; the log and the
// progress to stderr.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "apps/fftune/text_table.hpp"

namespace fftune::tool {

/// The flags that every command has.
struct OutputFlags {
  bool json = false;
  bool verbose = false;
  bool quiet = false;
};

class Output {
 public:
  Output(const OutputFlags& flags, bool no_color);

  bool json() const { return flags_.json; }
  bool verbose() const { return flags_.verbose; }
  bool quiet() const { return flags_.quiet; }

  /// One line, and a table, on stdout; nothing with --json.
  void line(std::string_view text) const;
  void heading(std::string_view text) const;
  void table(const TextTable& table) const;
  /// The one JSON document, on stdout; nothing without --json.
  void document(const nlohmann::ordered_json& document) const;

 private:
  OutputFlags flags_;
  bool color_;
};

}  // namespace fftune::tool
