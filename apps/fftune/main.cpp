// The tool: builds the command line from the catalog, runs the command, and is the only place that
// catches.
#include <fmt/format.h>
#include <spdlog/version.h>
#include <unistd.h>

#include <CLI/Version.hpp>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/commands.hpp"
#include "apps/fftune/inspect/ops.hpp"
#include "apps/fftune/terminal/json.hpp"
#include "apps/fftune/terminal/output.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "core/file_access.hpp"
#include "runtime/device_sources.hpp"

namespace fftune::tool {

namespace {

/// Every command, in the order of --help: a new one is declared in commands.hpp and has a row here.
constexpr void (*commands[])(CommandLine&){
    add_tune,  // one command for each op, named after it
    add_tune_presets, add_tune_vllm,
    add_devices,  //
    add_ops,      //
    add_list,     //
    add_check,    //
    add_bench,    //
    add_compile,  //
    add_bundle,   //
    add_refresh,  //
    add_presets,  //
    add_report,   //
    add_worker,   // hidden
};

/// The versions of fftune and of what it is built with.
std::string version_text(bool as_json) {
  const auto three = [](int major, int minor, int patch) {
    return fmt::format("{}.{}.{}", major, minor, patch);
  };
  const std::pair<const char*, std::string> versions[] = {
      {"fftune", FFTUNE_VERSION},
      {"compiler", __VERSION__},
      {"CLI11", CLI11_VERSION},
      {"fmt", three(FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100)},
      {"nlohmann-json", json_library_version()},
      {"spdlog", three(SPDLOG_VER_MAJOR, SPDLOG_VER_MINOR, SPDLOG_VER_PATCH)}};
  Json document;
  std::string lines;
  for (const auto& [name, version] : versions) {
    document[name] = version;
    lines += fmt::format("{} {}\n", name, version);
  }
  return as_json ? json_page(document) : lines;
}

int report(int code, const std::string& message) {
  const std::string line =
      fmt::format("{}{}\n", is_terminal(stderr) && !dumb_terminal() ? clear_line : "",
                  message_text("fftune: " + message));
  std::fwrite(line.data(), 1, line.size(), stderr);
  return code;
}

int parse_and_run(int argc, char** argv) {
  CommandLine line(builtin_catalog());
  Command& root = line.root();
  bool version = false;
  bool as_json = false;
  bool reference = false;
  bool header = false;
  bool table = false;
  root.flag("--version", version, "print the versions of fftune and of what it is built with");
  root.flag("--json", as_json, "with --version: as one JSON document").needs = "--version";
  root.flag("--reference", reference, "print the help of every command as one Markdown page");
  root.flag("--ops-header", header, "", "");
  root.flag("--op-table", table, "", "");
  for (const auto add : commands) add(line);

  const Given given = parse(root, argc, argv);
  if (given.help || argc < 2) {
    print(help_text(*given.command, help_width()));
    return exit_good;
  }
  if (version || reference || header || table) {
    print(version     ? version_text(as_json)
          : reference ? reference_page(root)
          : header    ? ops_header(line.catalog())
                      : op_table(line.catalog()));
    return exit_good;
  }
  if (!given.command->run) return report(exit_wrong_input, missing_command(*given.command));

  const Environment environment = read_environment();
  const Output output(line.flags(), environment);
  start_log(output, environment.no_color);
  const auto sources = device_sources(*line.catalog().sources, environment);
  Catalog catalog = line.catalog();
  if (sources) catalog.sources = sources.get();
  return given.command->run(Session{catalog, environment, output});
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
    return report(
        exit_lacking,
        limit
            ? "no more threads or processes can be started: raise the limit (ulimit -u, -v or -d, "
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
  fftune::hold_standard_descriptors();
  // A file that reaches a limit is then an error of its write, like a full disk.
  std::signal(SIGXFSZ, SIG_IGN);
  return fftune::tool::guarded(argc, argv);
}
