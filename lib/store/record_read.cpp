#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>

#include "core/error.hpp"
#include "store/json.hpp"
#include "store/record_json.hpp"

namespace fftune {
namespace {

[[noreturn]] void complain(const std::string& what) {
  throw Error(ErrorKind::invalid_input, what);
}

/// In `pattern`, '0' matches a digit and 'x' a lower-case hexadecimal digit.
bool matches(std::string_view text, std::string_view pattern) {
  return std::equal(text.begin(), text.end(), pattern.begin(), pattern.end(),
                    [](char c, char expected) {
                      const bool digit = c >= '0' && c <= '9';
                      if (expected == '0') return digit;
                      return expected == 'x' ? digit || (c >= 'a' && c <= 'f') : c == expected;
                    });
}

DType dtype_at(FieldReader& fields) {
  try {
    return parse_dtype(fields.text("dtype"));
  } catch (const Error&) {
    fields.expected("dtype", "\"f32\", \"bf16\", \"fp16\" or \"fp8\"", fields.at("dtype"));
  }
}

/// A hash of 64 bits.
std::string hash_at(FieldReader& fields, std::string_view key) {
  const auto& hash = fields.text(key);
  if (!matches(hash, "xxxxxxxxxxxxxxxx"))
    fields.expected(key, "16 lower-case hexadecimal digits", {hash});
  return hash;
}

std::string bits_at(FieldReader& fields) {
  return fields.has("bits") ? hash_at(fields, "bits") : "";
}

std::vector<Timed> timed_at(FieldReader& fields, std::string_view key) {
  std::vector<Timed> entries;
  for (const auto& item : fields.array(key)) {
    FieldReader entry(item, fmt::format("{}[{}]", fields.path(key), entries.size()));
    entries.push_back({entry.nonempty_text("id"), entry.number("median_us", true), bits_at(entry)});
    entry.finish();
  }
  return entries;
}

ParameterValue parameter_at(const FieldReader& fields, const std::string& name,
                            const JsonValue& value) {
  if (const auto* integer = value.get_if<std::int64_t>()) return *integer;
  const auto* word = value.get_if<std::string>();
  if (!word || !is_parameter_word(*word))
    fields.expected(name, "an integer, or a word such as \"pingpong\"", value);
  return *word;
}

StageRecord stage_from_json(const JsonValue& value, const std::string& where) {
  FieldReader fields(value, where);
  StageRecord stage;
  stage.stages = fields.names("stages");
  if (stage.stages.empty()) complain(fields.path("stages") + ": expected at least one stage");
  stage.variant.family = fields.name("family");
  FieldReader parameters(fields.at("parameters"), fields.path("parameters"));
  for (const auto& [name, parameter] : parameters.rest()) {
    if (!is_name(name)) parameters.expected_name(name);
    stage.variant.config.set(name, parameter_at(parameters, name, parameter));
  }
  stage.source_hash = hash_at(fields, "source_hash");
  stage.median_us = fields.number("median_us", true);
  stage.bits = bits_at(fields);
  stage.ties = timed_at(fields, "ties");
  stage.runners_up = timed_at(fields, "runners_up");
  stage.feasible = fields.count("feasible");
  stage.measured = fields.count("measured");
  stage.failed = fields.count("failed");
  fields.finish();
  return stage;
}

Verdict verdict_from_json(const JsonValue& value) {
  FieldReader fields(value, "verdict");
  Verdict verdict;
  verdict.median_us = fields.number("median_us", true);
  verdict.interval_low_us = fields.number("interval_low_us", true);
  verdict.interval_high_us = fields.number("interval_high_us", true);
  if (verdict.interval_low_us > verdict.interval_high_us)
    fields.expected("interval_low_us", "a number no larger than interval_high_us",
                    fields.at("interval_low_us"));
  verdict.noise = fields.number("noise");
  verdict.roofline_fraction = fields.number("roofline_fraction");
  verdict.limit = fields.text("limit");
  if (verdict.limit != "compute" && verdict.limit != "memory")
    fields.expected("limit", "\"compute\" or \"memory\"", {verdict.limit});
  verdict.unfused_ratio = fields.number("unfused_ratio");
  verdict.strategy = fields.name("strategy");
  verdict.complete = fields.boolean("complete");
  if (fields.has("decided")) verdict.decided = fields.boolean("decided");
  if (fields.has("disturbances")) verdict.disturbances = fields.names("disturbances");
  if (fields.has("untuned_ratio")) verdict.untuned_ratio = fields.number("untuned_ratio", true);
  fields.finish();
  return verdict;
}

Provenance provenance_from_json(const JsonValue& value) {
  FieldReader fields(value, "provenance");
  Provenance provenance;
  provenance.fftune = fields.nonempty_text("fftune");
  provenance.device = fields.nonempty_text("device");
  provenance.driver = fields.text("driver");
  provenance.toolkit = fields.text("toolkit");
  provenance.clock_mhz = fields.number("clock_mhz");
  provenance.date = fields.text("date");
  if (!matches(provenance.date, "0000-00-00T00:00:00Z"))
    fields.expected("date", "a UTC time such as 2026-11-21T14:03:22Z", {provenance.date});
  provenance.seed = fields.unsigned_integer("seed");
  fields.finish();
  return provenance;
}

}  // namespace

Problem problem_from_json_value(const JsonValue& value, const std::string& where,
                                std::int64_t least_size, bool* dtype_given) {
  FieldReader fields(value, where);
  Problem problem;
  problem.op = fields.name("op");
  problem.pass = value.find("pass") ? fields.name("pass") : "fwd";
  const bool given = value.find("dtype") || !dtype_given;
  if (given) problem.dtype = dtype_at(fields);
  if (dtype_given) *dtype_given = given;
  for (const auto& [name, item] : fields.rest()) {
    if (!is_name(name)) fields.expected_name(name);
    if (item.get_if<std::string>()) {
      problem.options[name] = fields.choice(name);
    } else if (item.get_if<std::int64_t>()) {
      problem.sizes[name] =
          fields.integer(name, least_size, std::numeric_limits<std::int64_t>::max());
    } else {
      fields.expected(name, "a size, which is an integer, or an option, which is a string", item);
    }
  }
  return problem;
}

PresetDevice device_from_json(const JsonValue& value, const std::string& where) {
  FieldReader fields(value, where);
  PresetDevice device;
  device.slug = fields.name("slug");
  device.name = fields.nonempty_text("name");
  const auto& kind = fields.text("kind");
  if (kind != "cuda" && kind != "cpu") fields.expected("kind", "\"cuda\" or \"cpu\"", {kind});
  device.kind = kind == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  device.arch = fields.name("arch");
  device.multiprocessors =
      static_cast<int>(fields.integer("multiprocessors", 1, std::numeric_limits<int>::max()));
  device.aliases = fields.names("aliases");
  fields.finish();
  return device;
}

PresetRecord record_from_json(const JsonValue& value) {
  FieldReader fields(value, "");
  PresetRecord record;
  const auto& problem = fields.at("problem");
  record.problem = problem_from_json_value(problem, "problem", 1, nullptr);
  if (!problem.find("pass")) complain("problem.pass: is missing");
  for (const auto& item : fields.array("stages"))
    record.stages.push_back(stage_from_json(item, fmt::format("stages[{}]", record.stages.size())));
  if (record.stages.empty()) complain("stages: expected at least one");
  std::vector<std::string> covered;
  for (const auto& stage : record.stages)
    for (const auto& name : stage.stages) {
      if (std::find(covered.begin(), covered.end(), name) != covered.end())
        complain(fmt::format("stages: \"{}\" is covered twice", printable(name, 40)));
      covered.push_back(name);
    }
  record.verdict = verdict_from_json(fields.at("verdict"));
  record.error = fields.number("error");
  record.tolerance = fields.number("tolerance");
  if (record.error > record.tolerance)
    fields.expected("error", "a number no larger than the tolerance", fields.at("error"));
  record.provenance = provenance_from_json(fields.at("provenance"));
  fields.finish();
  return record;
}

}  // namespace fftune
