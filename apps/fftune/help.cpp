#include "apps/fftune/help.hpp"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <sstream>
#include <utility>
#include <vector>

#include "apps/fftune/exit_code.hpp"
#include "apps/fftune/terminal.hpp"
#include "apps/fftune/usage.hpp"

namespace fftune::tool {

namespace {

constexpr std::size_t widest_page = 100;  // longer lines are hard to read
constexpr std::size_t left_width = 26;

using Entry = std::pair<std::string, std::string>;  // left and right column

std::vector<const CLI::App*> subcommands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* sub) { return !sub->get_group().empty(); });
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

Entry entry_of(const CLI::Option& option) {
  std::string left;
  for (const std::string& name : option.get_snames()) left += (left.empty() ? "-" : ", -") + name;
  for (const std::string& name : option.get_lnames()) left += (left.empty() ? "--" : ", --") + name;
  if (left.empty())
    left = option.get_name(true);
  else if (option.get_type_size() != 0)
    left += " " + option.get_type_name();
  return {left, option.get_description()};
}

std::string usage_text(const CLI::App& app) {
  std::string usage = "Usage: " + command_path(app);
  if (!subcommands_of(app).empty()) usage += " COMMAND";
  usage += " [OPTIONS]";
  for (const CLI::Option* option : app.get_options())
    if (option->get_positional()) usage += " [" + option->get_name(true) + "...]";
  return usage + "\n";
}

}  // namespace

std::string HelpFormatter::make_help(const CLI::App* app, std::string, CLI::AppFormatMode) const {
  const std::string kind =
      app->get_group() == ops_group ? "search this device and write presets: " : "";
  std::string text =
      usage_text(*app) + "\n" + wrapped(kind + app->get_description(), 0, width_) + "\n";

  for (const char* const title : {ops_group, "Commands"}) {
    std::vector<Entry> commands;
    for (const CLI::App* sub : subcommands_of(*app))
      if ((sub->get_group() == ops_group) == (title == std::string(ops_group)))
        commands.emplace_back(sub->get_name(), sub->get_description());
    text += entries_text(title, commands, width_);
  }

  for (const std::string& group : app->get_groups()) {
    if (group.empty()) continue;  // hidden
    std::vector<Entry> entries;
    for (const CLI::Option* option : app->get_options())
      if (option->get_group() == group) entries.push_back(entry_of(*option));
    text += entries_text(group, entries, width_);
  }
  return text + "\n" + wrapped(exit_code_footer, 0, width_) + "\n";
}

std::size_t help_width() {
  return std::min(terminal_width(stdout, widest_page), widest_page);
}

std::string reference_page(const CLI::App& root) {
  std::string page =
      "# The command line\n\nGenerated from `--help` by the target `cli_reference`; a test checks "
      "that it is current.\n";
  std::vector<const CLI::App*> pending{&root};
  while (!pending.empty()) {
    const CLI::App* app = pending.back();
    pending.pop_back();
    page += fmt::format("\n## `{}`\n\n```\n{}```\n", command_path(*app),
                        HelpFormatter(widest_page).make_help(app, "", CLI::AppFormatMode::Normal));
    auto below = subcommands_of(*app);
    pending.insert(pending.end(), below.rbegin(), below.rend());
  }
  return page;
}

}  // namespace fftune::tool
