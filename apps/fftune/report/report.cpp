// fftune report: presets, journals and bench results as one page that opens offline.
#include "apps/fftune/report/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/commands.hpp"
#include "apps/fftune/presets/presets.hpp"
#include "apps/fftune/presets/records.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/utc.hpp"
#include "tuning/decide/verdict.hpp"
#include "tuning/log.hpp"

namespace fftune {

std::map<std::string, std::string> embedded_page();      // report.html, report.css, report.js
std::map<std::string, std::string> embedded_chart_js();  // empty if the build found none

}  // namespace fftune

namespace fftune::tool {

namespace {

struct Options {
  std::vector<std::string> paths;
  std::string out = "report.html";
};

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
    throw Error(
        ErrorKind::invalid_input,
        fmt::format("--out {} is there, and is what a report is made of: give another name, "
                    "such as report.html",
                    options.out));
  require_writable_file(options.out, "--out");
  ReportInput input = read_report_input(or_presets_folder(options.paths), session.catalog);
  Json data = report_data(input, session.catalog, utc_now());
  if (data["records"].size() + data["searches"].size() + data["benches"].size() == 0 &&
      !input.left_out.empty())
    throw Error(ErrorKind::invalid_input,
                input.left_out.front() + ": there is nothing to report on");
  const std::string page = report_page(data);
  replace_file(options.out, page);
  for (const std::string& one : input.left_out) logging::warn("{}; it is left out", one);
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
  auto [command, options] = line.add<Options>(
      line.root(), "report",
      "presets, journals and bench results as one HTML page that opens offline; records "
      "of one problem from several devices or paths are compared with the first",
      run);
  command.option("PATH", options.paths,
                 "presets, journals, folders of either, or the output of fftune bench --json "
                 "(default: presets)");
  command.option("-o,--out FILE", options.out, "the page");
}

namespace {

/// No text of it ends the script element that it stands in, or begins a comment there.
std::string as_script(const Json& data) {
  std::string text;
  for (const char letter : json_line(data))
    if (letter == '<')
      text += "\\u003c";
    else
      text += letter;
  return text;
}

void put(std::string& page, std::string_view place, const std::string& text) {
  const std::size_t at = page.find(place);
  if (at == page.npos)
    throw Error(ErrorKind::internal, "the report's page has no place for " + std::string(place));
  page.replace(at, place.size(), text);
}

}  // namespace

std::string report_page(const Json& data) {
  const auto chart_js = embedded_chart_js();
  if (chart_js.empty())
    throw Error(ErrorKind::unavailable,
                "this fftune was built without Chart.js, which draws the report: install "
                "libjs-chart.js (or give FFTUNE_CHART_JS to CMake), configure and build again");
  auto files = embedded_page();
  std::string page = files.at("report.html");
  // The data last: whatever it holds is not taken for a place.
  put(page, "/*report.css*/", files.at("report.css"));
  put(page, "/*chart.js*/", chart_js.begin()->second);
  put(page, "/*report.js*/", files.at("report.js"));
  put(page, "/*most_share_of_limit*/", fmt::format("{}", most_share_of_limit));
  put(page, "/*data*/", as_script(data));
  return page;
}

}  // namespace fftune::tool
