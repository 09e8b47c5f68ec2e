#include "apps/fftune/earlier_times.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "apps/fftune/commands/presets.hpp"
#include "apps/fftune/json.hpp"
#include "core/error.hpp"
#include "store/preset_library.hpp"

namespace fftune::tool {

namespace {

/// The document of a bench; null for anything else.
Json bench_document(const std::string& path) {
  if (!std::filesystem::is_regular_file(path)) return nullptr;
  std::ifstream in(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  Json document = Json::parse(text, nullptr, false);
  const bool is_bench = document.is_object() && document.contains("problems");
  return is_bench ? document : Json(nullptr);
}

std::map<Problem, Measured> times_of_bench(const Json& document) {
  std::map<Problem, Measured> times;
  for (const Json& row : document["problems"]) {
    const Json& own = row.at("entries").empty() ? Json() : row.at("entries").front();
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

}  // namespace

std::map<Problem, Measured> earlier_times(const std::string& path, const DeviceFacts& facts) {
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

}  // namespace fftune::tool
