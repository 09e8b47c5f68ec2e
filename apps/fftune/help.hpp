// The text of --help, and the reference page made of it. Written here rather than by CLI11, whose
// layout changes from version to version.
#pragma once

#include <CLI/CLI.hpp>
#include <cstddef>
#include <string>

namespace fftune::tool {

/// The commands named after an op, each a search.
inline constexpr const char* ops_group = "Ops, to search this device and write presets";
inline constexpr const char* help_of_help = "print this help";

class HelpFormatter : public CLI::Formatter {
 public:
  explicit HelpFormatter(std::size_t width) : width_(width) {}
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override;

 private:
  std::size_t width_;  // of a line
};

/// $COLUMNS or the terminal's columns, but no more than are easy to read.
std::size_t help_width();

/// Every command's help as one Markdown page: docs/cli.md. It is the same on every
/// terminal.
std::string reference_page(const CLI::App& root);

}  // namespace fftune::tool
