#include "tuning/protocol/messages.hpp"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "core/lookup.hpp"
#include "store/preset_file.hpp"

namespace fftune {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

JsonValue finite(double value) {
  return std::isfinite(value) ? JsonValue(value) : JsonValue();
}

double number(const JsonValue& value, double if_null) {
  return value.get_if<std::nullptr_t>() ? if_null : value_as<double>(value);
}

void require(bool holds, const char* what) {
  if (!holds) throw Error(ErrorKind::invalid_input, fmt::format("{} is out of range", what));
}

int count_of(const JsonValue& message, const char* name) {
  const int value = field_as<int>(message, name);
  require(value >= 0, name);
  return value;
}

std::size_t size_of(const JsonValue& message, const char* name) {
  return field_as<std::size_t>(message, name);
}

const Lookup<ErrorKind, std::string_view> error_kinds = {
    {ErrorKind::invalid_input, "invalid_input"}, {ErrorKind::unavailable, "unavailable"},
    {ErrorKind::device_fault, "device_fault"},   {ErrorKind::io, "io"},
    {ErrorKind::internal, "internal"},
};

}  // namespace

std::string line_of(const JsonValue& message) {
  return json_line(message);
}

JsonValue message_of(const DeviceFacts& facts) {
  return {{"kind", facts.kind == DeviceKind::cuda ? "cuda" : "cpu"},
          {"name", facts.name},
          {"arch", facts.arch},
          {"compute_capability", facts.compute_capability},
          {"multiprocessors", facts.multiprocessors},
          {"registers_per_multiprocessor", facts.registers_per_multiprocessor},
          {"shared_bytes_per_block", facts.shared_bytes_per_block},
          {"shared_bytes_per_multiprocessor", facts.shared_bytes_per_multiprocessor},
          {"l2_bytes", facts.l2_bytes},
          {"memory_bytes", facts.memory_bytes},
          {"memory_bandwidth", finite(facts.memory_bandwidth)},
          {"clock_hz", finite(facts.clock_hz)},
          {"driver", facts.driver},
          {"toolkit", facts.toolkit},
          {"details", facts.details}};
}

DeviceFacts read_facts(const JsonValue& message) {
  DeviceFacts facts;
  const auto kind = field_as<std::string>(message, "kind");
  require(kind == "cuda" || kind == "cpu", "kind");
  facts.kind = kind == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  read_field(message, "name", facts.name);
  read_field(message, "arch", facts.arch);
  facts.compute_capability = count_of(message, "compute_capability");
  facts.multiprocessors = count_of(message, "multiprocessors");
  facts.registers_per_multiprocessor = count_of(message, "registers_per_multiprocessor");
  read_field(message, "shared_bytes_per_block", facts.shared_bytes_per_block);
  read_field(message, "shared_bytes_per_multiprocessor", facts.shared_bytes_per_multiprocessor);
  read_field(message, "l2_bytes", facts.l2_bytes);
  read_field(message, "memory_bytes", facts.memory_bytes);
  facts.memory_bandwidth = number(member(message, "memory_bandwidth"), 0);
  facts.clock_hz = number(member(message, "clock_hz"), 0);
  read_field(message, "driver", facts.driver);
  read_field(message, "toolkit", facts.toolkit);
  const auto* const details = member(message, "details").get_if<JsonValue::Object>();
  require(details != nullptr, "details");
  for (const auto& [name, text] : *details)
    facts.details.emplace_back(name, value_as<std::string>(text));
  return facts;
}

JsonValue message_of(const Limits& limits) {
  return {{"bytes_per_second", finite(limits.bytes_per_second)},
          {"flops_per_second", finite(limits.flops_per_second)},
          {"method", limits.method}};
}

Limits read_limits(const JsonValue& message) {
  Limits limits{number(member(message, "bytes_per_second"), 0),
                number(member(message, "flops_per_second"), 0),
                field_as<std::string>(message, "method")};
  require(limits.bytes_per_second >= 0 && limits.flops_per_second >= 0, "a ceiling");
  return limits;
}

JsonValue message_of(const Problem& problem) {
  return parse_json(problem_json(problem));
}

Problem read_problem(const JsonValue& message) {
  return problem_from_json(json_line(message)).problem;
}

JsonValue message_of(const Candidate& candidate) {
  JsonValue::Array recipe;
  for (const auto& variant : candidate.recipe) recipe.push_back(variant.id());
  return {{"first_stage", candidate.first_stage},
          {"recipe", std::move(recipe)},
          {"baseline", candidate.baseline}};
}

Candidate read_candidate(const JsonValue& message) {
  Candidate candidate;
  candidate.first_stage = size_of(message, "first_stage");
  for (const auto& id : field_as<std::vector<std::string>>(message, "recipe"))
    candidate.recipe.push_back(Variant::parse(id));
  read_field(message, "baseline", candidate.baseline);
  return candidate;
}

JsonValue message_of(const std::vector<Candidate>& candidates) {
  JsonValue::Array all;
  for (const auto& candidate : candidates) all.push_back(message_of(candidate));
  return all;
}

std::vector<Candidate> read_candidates(const JsonValue& message) {
  std::vector<Candidate> candidates;
  for (const auto& each : items_of(message)) candidates.push_back(read_candidate(each));
  return candidates;
}

JsonValue message_of(const TimeRequest& request) {
  return {{"samples", request.samples},
          {"seconds", finite(request.seconds)},
          {"abandon_above_us", finite(request.abandon_above_us)}};
}

TimeRequest read_time_request(const JsonValue& message) {
  return {count_of(message, "samples"), number(member(message, "seconds"), infinity),
          number(member(message, "abandon_above_us"), infinity)};
}

JsonValue message_of(const Setup& setup) {
  return {{"buffer_sets", setup.buffer_sets},
          {"bytes_per_set", setup.bytes_per_set},
          {"refusal", setup.refusal}};
}

Setup read_setup(const JsonValue& message) {
  return {count_of(message, "buffer_sets"), size_of(message, "bytes_per_set"),
          field_as<std::string>(message, "refusal")};
}

JsonValue message_of(const Compiled& compiled) {
  return {{"registers", compiled.registers},
          {"spill_bytes", compiled.spill_bytes},
          {"shared_bytes", compiled.shared_bytes},
          {"seconds", finite(compiled.seconds)},
          {"cached", compiled.cached},
          {"warnings", compiled.warnings},
          {"failure", compiled.failure},
          {"fatal", compiled.fatal},
          {"killed", compiled.killed}};
}

Compiled read_compiled(const JsonValue& message) {
  Compiled compiled;
  compiled.registers = count_of(message, "registers");
  compiled.spill_bytes = count_of(message, "spill_bytes");
  compiled.shared_bytes = count_of(message, "shared_bytes");
  compiled.seconds = number(member(message, "seconds"), 0);
  read_field(message, "cached", compiled.cached);
  read_field(message, "warnings", compiled.warnings);
  read_field(message, "failure", compiled.failure);
  read_field(message, "fatal", compiled.fatal);
  read_field(message, "killed", compiled.killed);
  return compiled;
}

JsonValue message_of(const Verified& verified) {
  return {{"passed", verified.passed},
          {"error", finite(verified.error)},
          {"tolerance", finite(verified.tolerance)},
          {"device_fault", verified.device_fault},
          {"wrote_beyond", verified.wrote_beyond},
          {"bits", verified.bits},
          {"failure", verified.failure},
          {"fatal", verified.fatal},
          {"killed", verified.killed},
          {"cancelled", verified.cancelled}};
}

Verified read_verified(const JsonValue& message) {
  Verified verified;
  read_field(message, "passed", verified.passed);
  verified.error = number(member(message, "error"), infinity);
  verified.tolerance = number(member(message, "tolerance"), 0);
  read_field(message, "device_fault", verified.device_fault);
  read_field(message, "wrote_beyond", verified.wrote_beyond);
  read_field(message, "bits", verified.bits);
  read_field(message, "failure", verified.failure);
  read_field(message, "fatal", verified.fatal);
  read_field(message, "killed", verified.killed);
  read_field(message, "cancelled", verified.cancelled);
  require(verified.passed == verified.failure.empty(), "a verdict with its reason");
  require(!verified.passed || verified.error <= verified.tolerance, "the error of what passed");
  return verified;
}

JsonValue message_of(const Timing& timing) {
  return {{"samples_us", timing.samples_us},
          {"abandoned", timing.abandoned},
          {"device_fault", timing.device_fault},
          {"failure", timing.failure},
          {"fatal", timing.fatal},
          {"killed", timing.killed}};
}

Timing read_timing(const JsonValue& message) {
  Timing timing;
  read_field(message, "samples_us", timing.samples_us);
  for (const double sample : timing.samples_us)
    require(std::isfinite(sample) && sample > 0, "a sample");
  read_field(message, "abandoned", timing.abandoned);
  read_field(message, "device_fault", timing.device_fault);
  read_field(message, "failure", timing.failure);
  read_field(message, "fatal", timing.fatal);
  read_field(message, "killed", timing.killed);
  return timing;
}

std::string_view error_kind_name(ErrorKind kind) {
  return value_of(kind, error_kinds);
}

ErrorKind parse_error_kind(std::string_view name) {
  if (const auto kind = find_key(name, error_kinds)) return *kind;
  throw Error(ErrorKind::invalid_input, fmt::format("'{}' is not a kind of error", name));
}

JsonValue answer_to(const JsonValue& call, Evaluator& evaluator,
                    const Evaluator::CompileSink& compiled) {
  const auto name = field_as<std::string>(call, "call");
  if (name == "limits")
    return message_of(evaluator.limits(parse_dtype(field_as<std::string>(call, "dtype"))));
  if (name == "disturbances") return evaluator.disturbances();
  if (name == "begin") {
    evaluator.avoid(field_as<std::set<std::string>>(call, "avoid"));
    return message_of(evaluator.begin(read_problem(member(call, "problem"))));
  }
  if (name == "compile") {
    evaluator.compile(read_candidates(member(call, "candidates")), compiled);
    return nullptr;
  }
  if (name == "verify")
    return message_of(evaluator.verify(read_candidate(member(call, "candidate"))));
  if (name == "time") {
    JsonValue::Array all;
    for (const auto& timing : evaluator.time(read_candidates(member(call, "candidates")),
                                             read_time_request(member(call, "request"))))
      all.push_back(message_of(timing));
    return all;
  }
  throw Error(ErrorKind::internal, "a worker was called for what it does not know");
}

JsonValue error_reply(const Error& error) {
  return {{"reply", "error"}, {"kind", error_kind_name(error.kind())}, {"text", error.what()}};
}

void serve_calls(LineChannel& channel, const std::function<void(const JsonValue&)>& answer) {
  while (!channel.closed()) {
    const auto line = channel.receive(infinity);
    if (!line) continue;
    const JsonValue call = parse_json(*line);
    if (field_as<std::string>(call, "call") != "stop") answer(call);
  }
}

}  // namespace fftune
