#include "apps/fftune/command.hpp"
#include <CLI/CLI.hpp>

namespace fftune::tool {

CLI::App& CommandLine::add_group(CLI::App& parent, const std::string& name,
                                 const std::string& summary) {
  CLI::App& command = *parent.add_subcommand(name, summary);
  command.require_subcommand(0, 1);
  // Left to unexpected_words(), which knows the intended word.
  command.allow_extras();
  return command;
}

CLI::App& CommandLine::add(CLI::App& parent, const std::string& name, const std::string& summary,
                           Run run) {
  CLI::App& command = add_group(parent, name, summary);
  command.add_flag("--json", flags_.json, "print the result as one JSON document");
  CLI::Option* verbose = command.add_flag("-v,--verbose", flags_.verbose, "say more");
  command.add_flag("-q,--quiet", flags_.quiet, "print the result and errors alone")
      ->excludes(verbose);
  runs_.emplace_back(&command, std::move(run));
  return command;
}

const CLI::App& deepest(const CLI::App& root) {
  const CLI::App* app = &root;
  while (!app->get_subcommands().empty()) app = app->get_subcommands().front();
  return *app;
}

Run CommandLine::chosen() const {
  for (const auto& [command, run] : runs_)
    if (command == &deepest(root_)) return run;
  return {};
}

}  // namespace fftune::tool
