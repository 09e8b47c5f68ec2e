// The text of --help, and the reference page made of it. Written here rather than by CLI11, whose
// layout changes from version to version.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <utility>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/op_purposes.hpp"
#include "apps/fftune/terminal/text.hpp"

namespace fftune::tool {

namespace {

constexpr std::size_t widest_page = 100;  // longer lines are hard to read
constexpr std::size_t left_width = 26;

constexpr const char* commands_title = "Commands";

using Entry = std::pair<std::string, std::string>;  // left and right column

std::vector<const Command*> shown_commands(const Command& command) {
  std::vector<const Command*> shown;
  for (const Command& below : command.commands)
    if (!below.group.empty()) shown.push_back(&below);
  return shown;
}

/// In the order in which options use them.
std::vector<std::string> groups_of(const Command& command) {
  std::vector<std::string> groups;
  for (const Option& option : command.options)
    if (!option.group.empty() &&
        std::find(groups.begin(), groups.end(), option.group) == groups.end())
      groups.push_back(option.group);
  return groups;
}

std::string entries_text(const std::string& title, const std::vector<Entry>& entries,
                         std::size_t page_width) {
  if (entries.empty()) return "";
  std::string text = "\n" + title + ":\n";
  for (const auto& [left, right] : entries) {
    std::string start = "  " + left;
    if (start.size() + 2 > left_width)
      start += "\n" + std::string(left_width, ' ');
    else
      start.append(left_width - start.size(), ' ');
    text += start + wrapped(right, left_width, page_width) + "\n";
  }
  return text;
}

Entry entry_of(const Option& option) {
  std::string left = fmt::format("{}", fmt::join(option.names, ", "));
  if (!option.type.empty()) left += " " + option.type;
  return {left, option.help};
}

std::string usage_text(const Command& command) {
  std::string usage = "Usage: " + command.path();
  if (!shown_commands(command).empty()) usage += command.takes_op() ? " OP" : " COMMAND";
  usage += " [OPTIONS]";
  if (command.parent == nullptr) usage += "\n       fftune OP [OPTIONS]: search, and write presets";
  for (const Option& option : command.options)
    if (option.takes_words()) usage += " [" + option.names.front() + "...]";
  return usage + "\n";
}

}  // namespace

std::string help_text(const Command& command, std::size_t width) {
  const std::string kind =
      command.group == ops_group ? "search this device and write presets: " : "";
  std::string text = usage_text(command) + "\n" + wrapped(kind + command.summary, 0, width) + "\n";

  const std::vector<std::string> ops = command.op_names();
  std::map<std::string, std::vector<Entry>> entries;
  for (const Command* below : shown_commands(command)) {
    const bool is_op = std::find(ops.begin(), ops.end(), below->name) != ops.end();
    entries[is_op ? purpose_of(below->name) : commands_title].emplace_back(below->name,
                                                                           below->summary);
  }
  text += entries_text(commands_title, entries[commands_title], width);
  for (const std::string& title : op_purposes()) text += entries_text(title, entries[title], width);

  for (const std::string& group : groups_of(command)) {
    std::vector<Entry> own;
    for (const bool common : {false, true})
      for (const Option& option : command.options)
        if (option.group == group && option.common == common) own.push_back(entry_of(option));
    text += entries_text(group, own, width);
  }
  return text + "\n" + wrapped(exit_code_footer, 0, width) + "\n";
}

std::size_t help_width() {
  return std::min(terminal_width(stdout, widest_page), widest_page);
}

std::string reference_page(const Command& root) {
  std::string page =
      "# The command line\n\nThe output of `fftune --reference`: what `--help` says of every "
      "command.\n";
  std::vector<const Command*> pending{&root};
  while (!pending.empty()) {
    const Command* command = pending.back();
    pending.pop_back();
    page +=
        fmt::format("\n## `{}`\n\n```\n{}```\n", command->path(), help_text(*command, widest_page));
    const auto below = shown_commands(*command);
    pending.insert(pending.end(), below.rbegin(), below.rend());
  }
  return page;
}

}  // namespace fftune::tool
