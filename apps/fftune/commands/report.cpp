// fftune report: presets, journals and bench results as one page that opens offline.
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "apps/fftune/command.hpp"
#include "apps/fftune/commands/all.hpp"
#include "apps/fftune/commands/presets.hpp"
#include "apps/fftune/exit_code.hpp"
#include "apps/fftune/numbers.hpp"
#include "apps/fftune/report/report_data.hpp"
#include "apps/fftune/report/report_page.hpp"
#include "apps/fftune/writable.hpp"
#include "core/error.hpp"
#include "core/file_access.hpp"

namespace fftune::tool {

namespace {

struct Options {
  std::vector<std::string> paths;
  std::string out = "report.html";
};

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[sizeof "2026-11-21T14:03:22Z"];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

/// Whether the page would overwrite one of its own inputs, such as presets.
bool replaces_input(const std::string& out, const std::vector<std::string>& paths) {
  const std::filesystem::path file = out;
  std::error_code error;
  if (!std::filesystem::exists(file, error)) return false;
  const bool data = file.extension() == ".json" || file.extension() == ".jsonl";
  return data || std::any_of(paths.begin(), paths.end(), [&](const std::string& path) {
           return std::filesystem::equivalent(path, file, error);
         });
}

int run(const Options& options, const Session& session) {
  if (replaces_input(options.out, options.paths))
    throw Error(ErrorKind::invalid_input,
                fmt::format("-o {} is there, and is what a report is made of: give another name, "
                            "such as report.html",
                            options.out));
  require_writable_file(options.out, "-o");
  ReportInput input = read_report_input(or_presets_folder(options.paths), session.catalog);
  const Json data = report_data(input, session.catalog, utc_now());
  if (data["records"].empty() && data["searches"].empty() && data["benches"].empty() &&
      !input.left_out.empty())
    throw Error(ErrorKind::invalid_input,
                input.left_out.front() + ": there is nothing to report on");
  const std::string page = report_page(data);
  replace_file(options.out, page);
  for (const std::string& one : input.left_out) spdlog::warn("{}; it is left out", one);
  session.output.line(fmt::format(
      "wrote {}: {}, {}, {} compared, {}", options.out, counted(data["records"].size(), "record"),
      counted(data["searches"].size(), "searched problem"), data["comparisons"].size(),
      bytes_text(static_cast<double>(page.size()))));
  session.output.document({{"file", options.out},
                           {"bytes", page.size()},
                           {"records", data["records"].size()},
                           {"searches", data["searches"].size()},
                           {"benches", data["benches"].size()},
                           {"comparisons", data["comparisons"].size()},
                           {"left_out", input.left_out}});
  return input.left_out.empty() ? exit_good : exit_check_failed;
}

}  // namespace

void add_report(CommandLine& line) {
  auto options = std::make_shared<Options>();
  CLI::App& command =
      line.add(line.root(), "report",
               "presets, journals and bench results as one HTML page that opens offline; records "
               "of one problem from several devices or paths are compared with the first",
               [options](const Session& session) { return run(*options, session); });
  command.add_option("PATH", options->paths,
                     "presets, journals, folders of either, or the output of fftune bench --json "
                     "(default: presets)");
  command.add_option("-o,--out", options->out, "the page (default: report.html)")
      ->type_name("FILE");
}

}  // namespace fftune::tool
