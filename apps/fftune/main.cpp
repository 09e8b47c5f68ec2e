// The tool: builds the command line from the catalog, runs the command, and is the only place that
// catches.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <new>
#include <string>
#include <system_error>

#include "apps/fftune/command.hpp"
#include "apps/fftune/exit_code.hpp"
#include "apps/fftune/help.hpp"
#include "apps/fftune/log.hpp"
#include "apps/fftune/op_table.hpp"
#include "apps/fftune/ops_header.hpp"
#include "apps/fftune/terminal.hpp"
#include "apps/fftune/usage.hpp"
#include "apps/fftune/version.hpp"
#include "core/error.hpp"
#include "runtime/device_sources.hpp"

namespace fftune::tool {

namespace {

int report(int code, const std::string& message) {
  const std::string line = fmt::format(
      "{}fftune: {}\n", is_terminal(stderr) && !dumb_terminal() ? clear_line : "", shown(message));
  std::fwrite(line.data(), 1, line.size(), stderr);
  return code;
}

int parse_and_run(int argc, char** argv) {
  CLI::App root(
      "finds, records and runs the fastest configuration of fused transformer kernels; "
      "to begin: fftune ffn --d 1024 --h 2048",
      "fftune");
  root.formatter(std::make_shared<HelpFormatter>(help_width()));
  root.set_help_flag("-h,--help", help_of_help);
  root.require_subcommand(0, 1);
  root.allow_extras();
  bool version = false;
  bool as_json = false;
  bool reference = false;
  bool header = false;
  bool table = false;
  CLI::Option* const version_flag = root.add_flag(
      "--version", version, "print the versions of fftune and of what it is built with");
  root.add_flag("--json", as_json, "with --version: as one JSON document")->needs(version_flag);
  root.add_flag("--reference", reference, "")->group("");
  root.add_flag("--ops-header", header, "")->group("");
  root.add_flag("--op-table", table, "")->group("");

  CommandLine line(root, builtin_catalog());
  for (const AddCommand add : commands()) add(line);

  try {
    root.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    print(root.help());
    return exit_good;
  } catch (const CLI::ParseError& error) {
    if (const auto wrong = option_as_value(root)) return report(exit_wrong_input, *wrong);
    // A word that nothing took is most often why something else is missing.
    return report(exit_wrong_input, unexpected_word(root).value_or(parse_error_line(root, error)));
  }
  if (const auto wrong = option_as_value(root)) return report(exit_wrong_input, *wrong);
  if (const auto wrong = unexpected_word(root)) return report(exit_wrong_input, *wrong);
  if (const auto wrong = empty_option(root)) return report(exit_wrong_input, *wrong);
  if (version || reference || header || table) {
    print(version     ? version_text(as_json)
          : reference ? reference_page(root)
          : header    ? ops_header(line.catalog())
                      : op_table(line.catalog()));
    return exit_good;
  }
  if (argc < 2) {
    print(root.help());
    return exit_good;
  }
  const Run run = line.chosen();
  if (!run) return report(exit_wrong_input, missing_subcommand(deepest(root)));

  const Environment environment = read_environment();
  const Output output(line.flags(), environment);
  start_log(output, environment.no_color);
  const auto sources = device_sources(*line.catalog().sources, environment);
  Catalog catalog = line.catalog();
  if (sources) catalog.sources = sources.get();
  return run(Session{catalog, environment, output});
}

int guarded(int argc, char** argv) {
  try {
    return parse_and_run(argc, argv);
  } catch (const Error& error) {
    const bool own = error.kind() == ErrorKind::internal;
    return report(exit_code_of(error.kind()),
                  own ? fmt::format("{} (a fault of fftune itself: please report it)", error.what())
                      : error.what());
  } catch (const std::bad_alloc&) {
    return report(exit_lacking, "the host is out of memory: give a smaller problem");
  } catch (const std::filesystem::filesystem_error& error) {
    return report(exit_wrong_input, fmt::format("cannot use '{}': {}", error.path1().string(),
                                                error.code().message()));
  } catch (const std::system_error& error) {
    const bool limit = error.code() == std::errc::resource_unavailable_try_again;
    return report(exit_lacking,
                  limit
                      ? "no more threads or processes can be started: raise the limit (ulimit -u, "
                        "or the container's), or end others"
                      : fmt::format("the system refused: {}", error.what()));
  } catch (const std::exception& error) {
    return report(exit_lacking,
                  fmt::format("{} (a fault of fftune itself: please report it)", error.what()));
  }
}

}  // namespace

}  // namespace fftune::tool

int main(int argc, char** argv) {
  // A file that reaches a limit is then an error of its write, like a full disk.
  std::signal(SIGXFSZ, SIG_IGN);
  return fftune::tool::guarded(argc, argv);
}
