// The words of a command line, read by CLI11, and wrong ones, each as one line.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/values.hpp"
#include "core/error.hpp"
#include "core/nearest.hpp"

namespace fftune::tool {

namespace {

using Apps = std::map<const CLI::App*, const Command*>;

std::string joined_names(const Option& option) {
  return fmt::format("{}", fmt::join(option.names, ","));
}

void add_option(CLI::App& app, const Option& option) {
  const std::string names = joined_names(option);
  CLI::Option* added = nullptr;
  if (auto* const flag = std::get_if<bool*>(&option.value)) {
    added = app.add_flag(names, **flag);
  } else if (const auto* const value = std::get_if<Reader>(&option.value)) {
    // The texts are read by read_values(), once all words are known to be good.
    if (value->repeats)
      added = app.add_option_function<std::vector<std::string>>(names, [](const auto&) {});
    else
      added = app.add_option_function<std::string>(names, [](const auto&) {});
    // An option that may be repeated takes one value each time.
    if (value->repeats && !option.takes_words()) added->allow_extra_args(false);
  } else {
    app.set_help_flag(names, option.help);
    return;
  }
  added->required(option.required);
  if (!option.needs.empty()) added->needs(app.get_option(option.needs));
  if (!option.excludes.empty()) added->excludes(app.get_option(option.excludes));
}

void fill(CLI::App& app, const Command& command, Apps& apps) {
  apps[&app] = &command;
  app.require_subcommand(0, 1);
  // Left to unexpected_word(), which knows the intended word.
  app.allow_extras();
  for (const Option& option : command.options) add_option(app, option);
  for (const Command& below : command.commands)
    fill(*app.add_subcommand(below.name, below.summary), below, apps);
}

/// The command that was given, as far down as words name one.
const CLI::App& deepest(const CLI::App& root) {
  const CLI::App* app = &root;
  while (!app->get_subcommands().empty()) app = app->get_subcommands().front();
  return *app;
}

std::vector<std::string> command_names(const Command& command) {
  std::vector<std::string> names;
  for (const Command& below : command.commands)
    if (!below.group.empty()) names.push_back(below.name);
  return names;
}

/// Without dashes, of all that are longer than a letter.
std::vector<std::string> long_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back(name);
  return names;
}

/// A word that is no option, also where it begins with a dash behind "--".
std::string line_for_word(const CLI::App& app, const Command& command, const std::string& word) {
  const std::string help = command.path() + " --help";
  const std::vector<std::string> names = command_names(command);
  if (names.empty()) {
    const auto has = [](const std::vector<std::string>& all, const std::string& one) {
      return std::find(all.begin(), all.end(), one) != all.end();
    };
    return has(long_names(app), "op") && has(command.op_names(), word)
               ? fmt::format("unexpected word '{}': give --op {}; see {}", word, word, help)
               : fmt::format("unexpected word '{}': see {}", word, help);
  }
  const std::string near = suggestion(word, names);
  return near.empty()
             ? fmt::format("unknown command '{}': give one of {}", word, fmt::join(names, ", "))
             : fmt::format("unknown command '{}'{} See {}", word, near, help);
}

std::string line_for(const CLI::App& app, const Command& command, const std::string& word) {
  if (word.rfind('-', 0) != 0) return line_for_word(app, command, word);
  const std::string help = command.path() + " --help";
  const std::string name = word.substr(0, word.find('='));
  const std::string bare = name.substr(std::min(name.find_first_not_of('-'), name.size()));
  // -h is help where no op has a size h; CLI11 then takes it before it comes to this.
  if (name == "-h") return "unknown option -h: give --help, or --h and a size";
  if (command.takes_op())
    return fmt::format("{} needs an op before {}: see {}", command.name, name, help);
  const std::string near = nearest(bare, long_names(app));
  return near.empty()
             ? fmt::format("unknown option {}: see {}", name, help)
             : fmt::format("unknown option {}: did you mean --{}? See {}", name, near, help);
}

/// The first word that no command took, as a line with a suggestion; or nothing. "--" ends the
/// options, and CLI11 gives what follows it to the root.
std::optional<std::string> unexpected_word(const CLI::App& root, const Apps& apps,
                                           const std::vector<std::string>& words) {
  const auto end_of_options = std::find(words.begin(), words.end(), "--");
  const CLI::App& last = deepest(root);
  for (const CLI::App* app = &last; app != nullptr; app = app->get_parent())
    for (const std::string& word : app->remaining()) {
      if (word == "--") continue;
      const bool is_behind = std::find(words.begin(), end_of_options, word) == end_of_options;
      return is_behind ? line_for_word(last, *apps.at(&last), word)
                       : line_for(*app, *apps.at(app), word);
    }
  return std::nullopt;
}

/// The words of a command line. A "--" in front of the name of a command goes behind it.
std::vector<std::string> words_of(const Command& root, int argc, const char* const* argv) {
  std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  const Command* command = &root;
  for (auto word = words.begin(); word != words.end(); ++word) {
    const auto name = *word == "--" ? std::next(word) : word;
    const auto below = std::find_if(
        command->commands.begin(), command->commands.end(),
        [&](const Command& each) { return name != words.end() && each.name == *name; });
    if (below == command->commands.end()) break;
    command = &*below;
    std::iter_swap(word, name);
  }
  return words;
}

/// The error if an option took another option as its value, as in `--d --h 16`; or nothing.
std::optional<std::string> option_as_value(const CLI::App& app, const Command& command) {
  const std::vector<std::string> names = long_names(app);
  for (const CLI::Option* option : app.get_options())
    for (const std::string& value : option->results())
      if (option->get_type_size() != 0 && value.starts_with("--") &&
          (value == "--" || std::find(names.begin(), names.end(),
                                      value.substr(2, value.find('=') - 2)) != names.end()))
        return fmt::format("{} lacks its value: {} follows it; see {} --help", option->get_name(),
                           value, command.path());
  return std::nullopt;
}

/// The error if an option or a word is empty, as a variable of a shell that is not set leaves it;
/// or nothing.
std::optional<std::string> empty_option(const CLI::App& app, const Command& command) {
  for (const CLI::Option* option : app.get_options()) {
    const auto& given = option->results();
    if (option->get_type_size() != 0 && std::find(given.begin(), given.end(), "") != given.end())
      return fmt::format("{} is empty: give it a value, or leave it out; see {} --help",
                         option->get_name(), command.path());
  }
  return std::nullopt;
}

/// The line for an error that CLI11 found.
std::string parse_error_line(const CLI::ParseError& error, const Command& command) {
  std::string reason = error.what();
  if (error.get_name() == "ArgumentMismatch") {
    const std::string option = reason.substr(0, reason.find(':'));
    const bool too_many = reason.find("At Most") != std::string::npos;
    reason = option + (too_many ? " is given more than once" : " lacks its value");
  }
  for (char& letter : reason)
    if (letter == '\n') letter = ' ';
  return fmt::format("{}: see {} --help", reason, command.path());
}

void read_values(const CLI::App& app, const Command& command) {
  for (const Option& option : command.options) {
    const auto* const reader = std::get_if<Reader>(&option.value);
    if (reader == nullptr) continue;
    const std::string& name = option.names.back();
    for (const std::string& text : app.get_option(name)->results()) reader->read(text, name);
  }
}

}  // namespace

Given parse(const Command& root, int argc, const char* const* argv) {
  CLI::App app("", root.name);
  Apps apps;
  fill(app, root, apps);
  const std::vector<std::string> words = words_of(root, argc, argv);
  std::optional<std::string> wrong;
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // as CLI11 wants them
  } catch (const CLI::CallForHelp&) {
    return {.command = apps.at(&deepest(app)), .help = true};
  } catch (const CLI::ParseError& error) {
    wrong = parse_error_line(error, *apps.at(&deepest(app)));
  }
  const CLI::App& given = deepest(app);
  const Command& command = *apps.at(&given);
  // A word that nothing took is most often why something else is missing.
  if (const auto first = option_as_value(given, command))
    wrong = first;
  else if (const auto second = unexpected_word(app, apps, words))
    wrong = second;
  else if (!wrong)
    wrong = empty_option(given, command);
  if (wrong) throw Error(ErrorKind::invalid_input, *wrong);
  read_values(given, command);
  return {.command = &command, .help = false};
}

std::string missing_command(const Command& command) {
  return fmt::format("{} needs {}: give one of {}", command.name,
                     command.takes_op() ? "an op" : "a command",
                     fmt::join(command_names(command), ", "));
}

}  // namespace fftune::tool
