#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <string>

#include "store/record_json.hpp"

namespace fftune {
namespace {

using Object = JsonValue::Object;

/// The value that `text` names, so that the printed number is `text` without its final zeros.
JsonValue number_of(const std::string& text, double otherwise) {
  double value = otherwise;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return {value};
}

JsonValue significant(double value) {
  return number_of(fmt::format("{:.3g}", value), value);
}

/// Small values keep three significant digits instead.
JsonValue rounded(double value, int decimals) {
  if (std::abs(value) < std::pow(10.0, 2 - decimals)) return significant(value);
  return number_of(fmt::format("{:.{}f}", value, decimals), value);
}

JsonValue microseconds(double value) {
  return rounded(value, 2);
}

JsonValue array_of(const std::vector<std::string>& names) {
  JsonValue::Array array;
  for (const auto& name : names) array.push_back({name});
  return {std::move(array)};
}

JsonValue array_of(const std::vector<Timed>& entries) {
  JsonValue::Array array;
  for (const auto& entry : entries) {
    Object object{{"id", {entry.id}}, {"median_us", microseconds(entry.median_us)}};
    if (!entry.bits.empty()) object.emplace_back("bits", JsonValue{entry.bits});
    array.push_back({std::move(object)});
  }
  return {std::move(array)};
}

JsonValue whole(std::int64_t value) {
  return {value};
}

JsonValue to_json(const ParameterValue& value) {
  return value.is_word() ? JsonValue{value.word()} : whole(value.number());
}

JsonValue to_json(const StageRecord& stage) {
  Object parameters;
  for (const auto& [name, value] : stage.variant.config.entries())
    parameters.emplace_back(name, to_json(value));
  Object object{{"stages", array_of(stage.stages)},
                {"family", {stage.variant.family}},
                {"parameters", {std::move(parameters)}},
                {"source_hash", {stage.source_hash}},
                {"median_us", microseconds(stage.median_us)}};
  if (!stage.bits.empty()) object.emplace_back("bits", JsonValue{stage.bits});
  object.emplace_back("ties", array_of(stage.ties));
  object.emplace_back("runners_up", array_of(stage.runners_up));
  object.emplace_back("feasible", whole(stage.feasible));
  object.emplace_back("measured", whole(stage.measured));
  object.emplace_back("failed", whole(stage.failed));
  return {std::move(object)};
}

JsonValue to_json(const Verdict& verdict) {
  Object object{{"median_us", microseconds(verdict.median_us)},
                {"interval_low_us", microseconds(verdict.interval_low_us)},
                {"interval_high_us", microseconds(verdict.interval_high_us)},
                {"noise", rounded(verdict.noise, 4)},
                {"roofline_fraction", rounded(verdict.roofline_fraction, 3)},
                {"limit", {verdict.limit}},
                {"unfused_ratio", rounded(verdict.unfused_ratio, 3)}};
  if (verdict.untuned_ratio)
    object.emplace_back("untuned_ratio", rounded(*verdict.untuned_ratio, 3));
  object.emplace_back("strategy", JsonValue{verdict.strategy});
  object.emplace_back("complete", JsonValue{verdict.complete});
  if (verdict.decided) object.emplace_back("decided", JsonValue{*verdict.decided});
  if (!verdict.disturbances.empty())
    object.emplace_back("disturbances", array_of(verdict.disturbances));
  return {std::move(object)};
}

JsonValue seed_of(std::uint64_t seed) {
  // As parse_json gives it back.
  const auto as_signed = static_cast<std::int64_t>(seed);
  return as_signed >= 0 ? whole(as_signed) : JsonValue{seed};
}

JsonValue to_json(const Provenance& provenance) {
  return {Object{{"fftune", {provenance.fftune}},
                 {"device", {provenance.device}},
                 {"driver", {provenance.driver}},
                 {"toolkit", {provenance.toolkit}},
                 {"clock_mhz", rounded(provenance.clock_mhz, 0)},
                 {"date", {provenance.date}},
                 {"seed", seed_of(provenance.seed)}}};
}

}  // namespace

JsonValue to_json(const Problem& problem) {
  Object object{{"op", {problem.op}},
                {"pass", {problem.pass}},
                {"dtype", {std::string(dtype_name(problem.dtype))}}};
  for (const auto& [name, value] : problem.sizes) object.emplace_back(name, whole(value));
  for (const auto& [name, value] : problem.options) object.emplace_back(name, JsonValue{value});
  return {std::move(object)};
}

JsonValue to_json(const PresetDevice& device) {
  return {Object{{"slug", {device.slug}},
                 {"name", {device.name}},
                 {"kind", {std::string(device.kind == DeviceKind::cuda ? "cuda" : "cpu")}},
                 {"arch", {device.arch}},
                 {"multiprocessors", whole(device.multiprocessors)},
                 {"aliases", array_of(device.aliases)}}};
}

JsonValue to_json(const PresetRecord& record) {
  JsonValue::Array stages;
  for (const auto& stage : record.stages) stages.push_back(to_json(stage));
  return {Object{{"problem", to_json(record.problem)},
                 {"stages", {std::move(stages)}},
                 {"verdict", to_json(record.verdict)},
                 {"error", significant(record.error)},
                 {"tolerance", significant(record.tolerance)},
                 {"provenance", to_json(record.provenance)}}};
}

}  // namespace fftune
