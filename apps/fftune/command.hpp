// A command: its options on the command line, and the function that runs it.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "apps/fftune/output.hpp"
#include "apps/fftune/session.hpp"

namespace CLI {
class App;
}  // namespace CLI

namespace fftune::tool {

/// Returns the exit code; throws Error.
using Run = std::function<int(const Session&)>;

/// The command line while it is built: commands add themselves here and leave their Run behind.
class CommandLine {
 public:
  CommandLine(CLI::App& root, const Catalog& catalog) : root_(root), catalog_(catalog) {}

  CLI::App& root() { return root_; }
  const Catalog& catalog() const { return catalog_; }

  /// A subcommand with the flags that all have. It runs `run` if it is the one that was given.
  /// Options that it binds must live as long as `run`: keep them in a shared_ptr that it holds.
  CLI::App& add(CLI::App& parent, const std::string& name, const std::string& summary, Run run);
  /// A subcommand that only holds others.
  CLI::App& add_group(CLI::App& parent, const std::string& name, const std::string& summary);

  const OutputFlags& flags() const { return flags_; }
  /// The run function of the deepest subcommand that was given; empty if it needs one below it.
  Run chosen() const;

 private:
  CLI::App& root_;
  const Catalog& catalog_;
  OutputFlags flags_;
  std::vector<std::pair<const CLI::App*, Run>> runs_;
};

/// The subcommand that was given, as far down as words name one; the root if none was.
const CLI::App& deepest(const CLI::App& root);

using AddCommand = void (*)(CommandLine&);

/// Every command, in the order of --help: a new one is a file in commands/ and a row here.
const std::vector<AddCommand>& commands();

}  // namespace fftune::tool
