#include "apps/fftune/against.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "apps/fftune/commands/presets.hpp"
#include "apps/fftune/json.hpp"
#include "apps/fftune/numbers.hpp"
#include "core/error.hpp"
#include "core/file_access.hpp"
#include "store/preset_library.hpp"

namespace fftune::tool {

namespace {

/// The document of a bench; null for anything else.
Json bench_document(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return nullptr;
  Json document;
  try {
    document = Json::parse(read_whole_file(path), nullptr, false);
  } catch (const Error& unreadable) {
    throw Error(unreadable.kind(), fmt::format("--against {} {}", path, unreadable.what()));
  }
  const bool is_bench = document.is_object() && document.contains("problems");
  return is_bench ? document : Json(nullptr);
}

std::map<Problem, Measured> times_of_bench(const Json& document) {
  std::map<Problem, Measured> times;
  for (const Json& row : document["problems"]) {
    const Json& own = row.at("entries").empty() ? Json() : row.at("entries").front();
    // Only the values that bench draws are the same every time.
    if (row.value("values", "random") != "random") continue;
    if (own.is_null() || !(own.at("median_us").get<double>() > 0)) continue;
    times[problem_from_json(row.at("problem").dump()).problem] = {own.at("median_us").get<double>(),
                                                                  own.at("low_us").get<double>(),
                                                                  own.at("high_us").get<double>()};
  }
  return times;
}

std::map<Problem, Measured> times_of_presets(const std::string& path, const DeviceFacts& facts) {
  std::map<Problem, Measured> own, other;
  for (const PresetFile& file : whole_preset_files({path}, "compared")) {
    const bool here = device_match(file.device, facts) == DeviceMatch::exact;
    for (const PresetRecord& record : file.records)
      (here ? own : other)[record.problem] = measured_of(record.verdict);
  }
  return own.empty() ? other : own;
}

std::map<Problem, Measured> earlier_times(const std::string& path, const DeviceFacts& facts) {
  if (path.empty()) return {};
  std::error_code error;
  if (!std::filesystem::exists(path, error))
    throw Error(ErrorKind::invalid_input,
                fmt::format("--against {} is not there: give what `fftune bench --json` printed, "
                            "or presets",
                            path));
  try {
    const Json document = bench_document(path);
    return document.is_null() ? times_of_presets(path, facts) : times_of_bench(document);
  } catch (const Json::exception&) {
    throw Error(ErrorKind::invalid_input,
                fmt::format("--against {} has problems without times: give what `fftune bench "
                            "--json` printed, or presets",
                            path));
  }
}

std::string interval_text(double low, double high) {
  return fmt::format("{}-{}", microseconds_text(low), microseconds_text(high));
}

}  // namespace

Against::Against(std::string path, const DeviceFacts& facts, const Catalog& catalog)
    : catalog_(catalog),
      path_(std::move(path)),
      table_({{""},
              {"dtype"},
              {"before µs", Align::right},
              {"95% interval", Align::right},
              {"now µs", Align::right},
              {"95% interval", Align::right},
              {"before / now", Align::right},
              {"verdict"}}) {
  for (const auto& [problem, measured] : earlier_times(path_, facts))
    times_[compared(problem)] = measured;
}

Problem Against::compared(const Problem& problem) const {
  return compared_part(problem, comparison_of(catalog_, problem.op));
}

Json Against::add(const std::string& token_size, const BenchResult& result) {
  const auto before = times_.find(compared(result.problem));
  if (before == times_.end() || result.entries.empty()) return nullptr;
  const Measured& then = before->second;
  const Summary& now = result.entries.front().microseconds;
  const Comparison verdict = compare(then, {now.median, now.low, now.high});
  counts_.add(verdict);
  table_.row({fmt::format("{}={}", token_size, result.problem.size(token_size)),
              std::string(dtype_name(result.problem.dtype)),
              microseconds_text(then.median_us),
              interval_text(then.low_us, then.high_us),
              microseconds_text(now.median),
              interval_text(now.low, now.high),
              ratio_cell(now.median > 0 ? then.median_us / now.median : 0),
              {std::string(comparison_name(verdict)), comparison_style(verdict)}});
  return {{"median_us", then.median_us},
          {"low_us", then.low_us},
          {"high_us", then.high_us},
          {"verdict", comparison_name(verdict)}};
}

void Against::print(const Output& output) const {
  if (table_.empty()) return;
  output.line("");
  output.heading("against " + path_);
  output.table(table_);
  output.line(counts_.text());
}

}  // namespace fftune::tool
