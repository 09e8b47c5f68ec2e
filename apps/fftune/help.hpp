// The text of --help, and the reference page made of it. Written here rather than by CLI11, whose
// layout changes from version to version.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace fftune::tool {

/// Words of `text` in lines of at most `width` letters; all but the first start at column `indent`.
std::string wrapped(const std::string& text, std::size_t indent, std::size_t width);

class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override;
};

/// Every command's help as one Markdown page: docs/cli.md.
std::string reference_page(const CLI::App& root);

}  // namespace fftune::tool
