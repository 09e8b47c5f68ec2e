#include "apps/fftune/command_line/command.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/split.hpp"

namespace fftune::tool {

namespace {

Option help_option() {
  return {.names = {"-h", "--help"},
          .type = {},
          .help = "print this help",
          .group = default_group,
          .value = std::monostate(),
          .common = true};
}

bool is_help(const Option& option) {
  return std::holds_alternative<std::monostate>(option.value);
}

}  // namespace

Option& Command::add(std::string_view spelled, Option option) {
  const std::size_t space = std::min(spelled.find(' '), spelled.size());
  for (const std::string_view name : split_at_commas(spelled.substr(0, space)))
    option.names.emplace_back(name);
  option.type = spelled.substr(std::min(space + 1, spelled.size()));
  // From CLI11 2.3 on, -h and an option --h are the same word: the option matters more. --help is
  // then the last of the options so far.
  if (std::find(option.names.begin(), option.names.end(), "--h") != option.names.end()) {
    const auto help_option = std::find_if(options.begin(), options.end(), is_help);
    help_option->names = {"--help"};
    options.splice(options.end(), options, help_option);
  }
  return options.emplace_back(std::move(option));
}

Option& Command::option(std::string_view spelled, Reader value, std::string help,
                        const char* in_group) {
  if (!value.initial.empty()) help += fmt::format(" (default: {})", value.initial);
  return add(spelled, {.names = {},
                       .type = {},
                       .help = std::move(help),
                       .group = in_group,
                       .value = std::move(value)});
}

Option& Command::flag(std::string_view spelled, bool& value, std::string help,
                      const char* in_group) {
  return add(
      spelled,
      {.names = {}, .type = {}, .help = std::move(help), .group = in_group, .value = &value});
}

Option* Command::find(std::string_view option_name) {
  for (Option& each : options)
    if (std::find(each.names.begin(), each.names.end(), option_name) != each.names.end())
      return &each;
  return nullptr;
}

std::string Command::path() const {
  return parent == nullptr ? name : parent->path() + " " + name;
}

std::vector<std::string> Command::op_names() const {
  if (parent != nullptr) return parent->op_names();
  std::vector<std::string> names;
  for (const Command& below : commands)
    if (below.group == ops_group) names.push_back(below.name);
  return names;
}

bool Command::takes_op() const {
  const std::vector<std::string> ops = op_names();
  return parent != nullptr && !commands.empty() &&
         std::all_of(commands.begin(), commands.end(), [&](const Command& below) {
           return std::find(ops.begin(), ops.end(), below.name) != ops.end();
         });
}

CommandLine::CommandLine(const Catalog& catalog)
    : catalog_(catalog),
      root_{.name = "fftune",
            .summary =
                "finds, records and runs the fastest configuration of fused transformer kernels; "
                "to begin: fftune ffn --d 1024 --h 2048",
            .group = "Commands",
            .run = {}} {
  root_.options.push_back(help_option());
}

std::vector<std::string> CommandLine::op_names() const {
  std::vector<std::string> names;
  for (const Op* op : catalog_.ops) names.emplace_back(op->name());
  return names;
}

Command& CommandLine::add_group(Command& parent, std::string name, std::string summary) {
  Command& command = parent.commands.emplace_back(Command{.name = std::move(name),
                                                          .summary = std::move(summary),
                                                          .group = "Commands",
                                                          .run = {},
                                                          .parent = &parent});
  command.options.push_back(help_option());
  return command;
}

Command& CommandLine::add(Command& parent, std::string name, std::string summary, Run run) {
  Command& command = add_group(parent, std::move(name), std::move(summary));
  command.run = std::move(run);
  command.flag("--json", flags_.json, "print the result as one JSON document").common = true;
  command.flag("-v,--verbose", flags_.verbose, "say more").common = true;
  Option& quiet = command.flag("-q,--quiet", flags_.quiet, "print the result and errors alone");
  quiet.common = true;
  quiet.excludes = "--verbose";
  return command;
}

}  // namespace fftune::tool
