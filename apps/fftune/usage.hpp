// Wrong command lines, each as one line: what, where, and what to do.
#pragma once

#include <optional>
#include <string>

namespace CLI {
class App;
class ParseError;
}  // namespace CLI

namespace fftune::tool {

/// "fftune presets show": the words that lead to a command.
std::string command_path(const CLI::App& command);

/// The first word that no command took, as a line with a suggestion; or nothing.
std::optional<std::string> unexpected_word(const CLI::App& root);

/// The first option or word of the given command that is empty, as a variable of a shell that is
/// not set leaves it, as a line; or nothing. The error if an option took another option as its
/// value, as in `--d --h 16`; nothing otherwise.
std::optional<std::string> option_as_value(const CLI::App& root);

std::optional<std::string> empty_option(const CLI::App& root);

/// That the given command needs one of its subcommands.
std::string missing_subcommand(const CLI::App& command);

/// The line for an error that CLI11 found.
std::string parse_error_line(const CLI::App& root, const CLI::ParseError& error);

}  // namespace fftune::tool
