#include "apps/fftune/usage.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <vector>

#include "apps/fftune/command.hpp"
#include "apps/fftune/values.hpp"
#include "core/nearest.hpp"

namespace fftune::tool {

namespace {

std::vector<std::string> subcommand_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::App* sub :
       command.get_subcommands([](const CLI::App* each) { return !each->get_group().empty(); }))
    names.push_back(sub->get_name());
  return names;
}

std::vector<std::string> option_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back(name);
  return names;
}

std::string line_for(const CLI::App& command, const std::string& word) {
  const std::string help = command_path(command) + " --help";
  if (word.rfind('-', 0) == 0) {
    const std::string name = word.substr(0, word.find('='));
    const std::string bare = name.substr(std::min(name.find_first_not_of('-'), name.size()));
    // -h is help where no op has a size h; CLI11 then takes it before it comes to this.
    if (name == "-h") return "unknown option -h: give --help, or --h and a size";
    const std::string near = nearest(bare, option_names(command));
    return near.empty()
               ? fmt::format("unknown option {}: see {}", name, help)
               : fmt::format("unknown option {}: did you mean --{}? See {}", name, near, help);
  }
  const std::vector<std::string> names = subcommand_names(command);
  if (names.empty()) return fmt::format("unexpected word '{}': see {}", word, help);
  const std::string near = suggestion(word, names);
  return near.empty()
             ? fmt::format("unknown command '{}': give one of {}", word, fmt::join(names, ", "))
             : fmt::format("unknown command '{}'{} See {}", word, near, help);
}

}  // namespace

std::string command_path(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent == nullptr ? command.get_name() : command_path(*parent) + " " + command.get_name();
}

std::optional<std::string> unexpected_word(const CLI::App& root) {
  const CLI::App* command = &root;
  while (true) {
    const std::vector<std::string> words = command->remaining();
    if (!words.empty()) return line_for(*command, words.front());
    if (command->get_subcommands().empty()) return std::nullopt;
    command = command->get_subcommands().front();
  }
}

std::string missing_subcommand(const CLI::App& command) {
  return fmt::format("{} needs a command: give one of {}", command.get_name(),
                     fmt::join(subcommand_names(command), ", "));
}

std::optional<std::string> option_as_value(const CLI::App& root) {
  const CLI::App& command = deepest(root);
  const std::vector<std::string> names = option_names(command);
  for (const CLI::Option* option : command.get_options())
    for (const std::string& value : option->results())
      if (option->get_type_size() != 0 && value.starts_with("--") &&
          std::find(names.begin(), names.end(), value.substr(2, value.find('=') - 2)) !=
              names.end())
        return fmt::format("{} lacks its value: {} follows it; see {} --help", option->get_name(),
                           value, command_path(command));
  return std::nullopt;
}

std::optional<std::string> empty_option(const CLI::App& root) {
  const CLI::App& command = deepest(root);
  for (const CLI::Option* option : command.get_options()) {
    const auto& given = option->results();
    if (option->get_type_size() != 0 && std::find(given.begin(), given.end(), "") != given.end())
      return fmt::format("{} is empty: give it a value, or leave it out; see {} --help",
                         option->get_name(), command_path(command));
  }
  return std::nullopt;
}

std::string parse_error_line(const CLI::App& root, const CLI::ParseError& error) {
  std::string reason = error.what();
  if (error.get_name() == "ArgumentMismatch") {
    const std::string option = reason.substr(0, reason.find(':'));
    const bool too_many = reason.find("At Most") != std::string::npos;
    reason = option + (too_many ? " is given more than once" : " lacks its value");
  }
  for (char& letter : reason)
    if (letter == '\n') letter = ' ';
  return fmt::format("{}: see {} --help", reason, command_path(deepest(root)));
}

}  // namespace fftune::tool
