// The command line as data: a tree of commands with their options. Commands add themselves to it,
// --help is written from it, and parse() reads the words of a command line by it. CLI11 stays
// behind parse().
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/command_line/values.hpp"

namespace fftune::tool {

inline constexpr const char* default_group = "Options";
/// The commands named after an op, each a search.
inline constexpr const char* ops_group = "Ops, to search this device and write presets";

struct Option {
  std::vector<std::string> names;  // "-o", "--out"; without dashes: words that no option takes
  std::string type;                // of the value, for --help: "FILE"; empty for a flag
  std::string help;
  std::string group;  // heading in --help; empty: hidden
  /// Where parse() writes what is given; nothing is for --help.
  std::variant<std::monostate, bool*, Reader> value;
  bool required = false;
  std::string needs = {};     // an option that must be given too
  std::string excludes = {};  // an option that must not be given too
  bool common = false;        // of every command: the last of its group in --help

  bool takes_words() const { return !names.front().starts_with('-'); }
};

struct Command {
  std::string name;
  std::string summary;
  std::string group;  // empty: hidden
  Run run;            // empty: it needs one of its commands
  const Command* parent = nullptr;
  std::list<Command> commands = {};  // in the order of --help; they stay where they are
  std::list<Option> options = {};

  /// Adds an option, spelled as in --help: "-o,--out FILE", or "PATH" for words: a text, words, or
  /// what a reader makes of it, such as whole(count, 1, 8). The value lives as long as the command,
  /// as its options do (CommandLine::add()); --help names what it is before parse().
  Option& option(std::string_view spelled, Reader value, std::string help,
                 const char* in_group = default_group);
  Option& flag(std::string_view spelled, bool& value, std::string help,
               const char* in_group = default_group);

  /// The option of that name, such as "--weights"; null if there is none.
  Option* find(std::string_view option_name);

  /// "fftune presets show": the words that lead here.
  std::string path() const;

  /// The names of all ops: the root has a command for each.
  std::vector<std::string> op_names() const;

  /// Whether its commands are the ops, as those of `fftune bench`.
  bool takes_op() const;

 private:
  Option& add(std::string_view spelled, Option option);
};

/// The command line while it is built.
class CommandLine {
 public:
  explicit CommandLine(const Catalog& catalog);
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  Command& root() { return root_; }
  const Command& root() const { return root_; }
  const Catalog& catalog() const { return catalog_; }
  /// The names of all ops.
  std::vector<std::string> op_names() const;
  const OutputFlags& flags() const { return flags_; }

  /// A command with the flags that all have.
  Command& add(Command& parent, std::string name, std::string summary, Run run);
  /// A command and its options, which live as long: it is run(options, session).
  template <class Options>
  std::pair<Command&, Options&> add(Command& parent, std::string name, std::string summary,
                                    int (*run)(const Options&, const Session&)) {
    const auto options = std::make_shared<Options>();
    return {add(parent, std::move(name), std::move(summary),
                [=](const Session& session) { return run(*options, session); }),
            *options};
  }
  /// The same for a command named after an op: run(op, options, session).
  template <class Options>
  std::pair<Command&, Options&> add(Command& parent, const Op& op,
                                    int (*run)(const Op&, Options&, const Session&)) {
    const auto options = std::make_shared<Options>();
    return {add(parent, std::string(op.name()), std::string(op.summary()),
                [=, &op](const Session& session) { return run(op, *options, session); }),
            *options};
  }
  /// A command that only holds others.
  Command& add_group(Command& parent, std::string name, std::string summary);

 private:
  const Catalog& catalog_;
  OutputFlags flags_;
  Command root_;
};

struct Given {
  const Command* command = nullptr;  // the deepest one that was named; the root if none was
  bool help = false;
};

/// Writes the options of a command line to their places. Throws Error(invalid_input): one line
/// with what is wrong, where, and what to do.
Given parse(const Command& root, int argc, const char* const* argv);

/// That the command needs one of its commands.
std::string missing_command(const Command& command);

/// The text of --help, in lines of `width` columns.
std::string help_text(const Command& command, std::size_t width);
/// $COLUMNS or the terminal's columns, but no more than are easy to read.
std::size_t help_width();

/// Every command's help as one Markdown page. It is the same on every terminal.
std::string reference_page(const Command& root);

}  // namespace fftune::tool
