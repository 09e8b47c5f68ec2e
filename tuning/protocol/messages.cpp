#include "tuning/protocol/messages.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

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

using nlohmann::json;

constexpr double infinity = std::numeric_limits<double>::infinity();

json finite(double value) {
  return std::isfinite(value) ? json(value) : json(nullptr);
}

double number(const json& value, double if_null) {
  return value.is_null() ? if_null : value.get<double>();
}

void require(bool holds, const char* what) {
  if (!holds) throw Error(ErrorKind::invalid_input, fmt::format("{} is out of range", what));
}

int count_of(const json& message, const char* name) {
  // Read wide: a narrow read would wrap large values.
  const auto value = message.at(name).get<double>();
  require(value >= 0 && value <= std::numeric_limits<int>::max() && value == std::floor(value),
          name);
  return static_cast<int>(value);
}

std::size_t size_of(const json& message, const char* name) {
  require(message.at(name).is_number_unsigned(), name);
  return message.at(name).get<std::size_t>();
}

const Lookup<ErrorKind, std::string_view> error_kinds = {
    {ErrorKind::invalid_input, "invalid_input"}, {ErrorKind::unavailable, "unavailable"},
    {ErrorKind::device_fault, "device_fault"},   {ErrorKind::io, "io"},
    {ErrorKind::internal, "internal"},
};

}  // namespace

std::string line_of(const json& message) {
  return message.dump(-1, ' ', false, json::error_handler_t::replace);
}

json message_of(const DeviceFacts& facts) {
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

DeviceFacts read_facts(const json& message) {
  DeviceFacts facts;
  const auto kind = message.at("kind").get<std::string>();
  require(kind == "cuda" || kind == "cpu", "kind");
  facts.kind = kind == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  message.at("name").get_to(facts.name);
  message.at("arch").get_to(facts.arch);
  facts.compute_capability = count_of(message, "compute_capability");
  facts.multiprocessors = count_of(message, "multiprocessors");
  facts.registers_per_multiprocessor = count_of(message, "registers_per_multiprocessor");
  message.at("shared_bytes_per_block").get_to(facts.shared_bytes_per_block);
  message.at("shared_bytes_per_multiprocessor").get_to(facts.shared_bytes_per_multiprocessor);
  message.at("l2_bytes").get_to(facts.l2_bytes);
  message.at("memory_bytes").get_to(facts.memory_bytes);
  facts.memory_bandwidth = number(message.at("memory_bandwidth"), 0);
  facts.clock_hz = number(message.at("clock_hz"), 0);
  message.at("driver").get_to(facts.driver);
  message.at("toolkit").get_to(facts.toolkit);
  message.at("details").get_to(facts.details);
  return facts;
}

json message_of(const Limits& limits) {
  return {{"bytes_per_second", finite(limits.bytes_per_second)},
          {"flops_per_second", finite(limits.flops_per_second)},
          {"method", limits.method}};
}

Limits read_limits(const json& message) {
  Limits limits{number(message.at("bytes_per_second"), 0),
                number(message.at("flops_per_second"), 0), message.at("method").get<std::string>()};
  require(limits.bytes_per_second >= 0 && limits.flops_per_second >= 0, "a ceiling");
  return limits;
}

json message_of(const Problem& problem) {
  return json::parse(problem_json(problem));
}

Problem read_problem(const json& message) {
  return problem_from_json(message.dump()).problem;
}

json message_of(const Candidate& candidate) {
  json recipe = json::array();
  for (const auto& variant : candidate.recipe) recipe.push_back(variant.id());
  return {{"first_stage", candidate.first_stage},
          {"recipe", std::move(recipe)},
          {"baseline", candidate.baseline}};
}

Candidate read_candidate(const json& message) {
  Candidate candidate;
  candidate.first_stage = size_of(message, "first_stage");
  for (const auto& id : message.at("recipe"))
    candidate.recipe.push_back(Variant::parse(id.get<std::string>()));
  message.at("baseline").get_to(candidate.baseline);
  return candidate;
}

json message_of(const std::vector<Candidate>& candidates) {
  json all = json::array();
  for (const auto& candidate : candidates) all.push_back(message_of(candidate));
  return all;
}

std::vector<Candidate> read_candidates(const json& message) {
  std::vector<Candidate> candidates;
  for (const auto& each : message) candidates.push_back(read_candidate(each));
  return candidates;
}

json message_of(const TimeRequest& request) {
  return {{"samples", request.samples},
          {"seconds", finite(request.seconds)},
          {"abandon_above_us", finite(request.abandon_above_us)}};
}

TimeRequest read_time_request(const json& message) {
  return {count_of(message, "samples"), number(message.at("seconds"), infinity),
          number(message.at("abandon_above_us"), infinity)};
}

json message_of(const Setup& setup) {
  return {{"buffer_sets", setup.buffer_sets},
          {"bytes_per_set", setup.bytes_per_set},
          {"refusal", setup.refusal}};
}

Setup read_setup(const json& message) {
  return {count_of(message, "buffer_sets"), size_of(message, "bytes_per_set"),
          message.at("refusal").get<std::string>()};
}

json message_of(const Compiled& compiled) {
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

Compiled read_compiled(const json& message) {
  Compiled compiled;
  compiled.registers = count_of(message, "registers");
  compiled.spill_bytes = count_of(message, "spill_bytes");
  compiled.shared_bytes = count_of(message, "shared_bytes");
  compiled.seconds = number(message.at("seconds"), 0);
  message.at("cached").get_to(compiled.cached);
  message.at("warnings").get_to(compiled.warnings);
  message.at("failure").get_to(compiled.failure);
  message.at("fatal").get_to(compiled.fatal);
  message.at("killed").get_to(compiled.killed);
  return compiled;
}

json message_of(const Verified& verified) {
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

Verified read_verified(const json& message) {
  Verified verified;
  message.at("passed").get_to(verified.passed);
  verified.error = number(message.at("error"), infinity);
  verified.tolerance = number(message.at("tolerance"), 0);
  message.at("device_fault").get_to(verified.device_fault);
  message.at("wrote_beyond").get_to(verified.wrote_beyond);
  message.at("bits").get_to(verified.bits);
  message.at("failure").get_to(verified.failure);
  message.at("fatal").get_to(verified.fatal);
  message.at("killed").get_to(verified.killed);
  message.at("cancelled").get_to(verified.cancelled);
  require(verified.passed == verified.failure.empty(), "a verdict with its reason");
  require(!verified.passed || verified.error <= verified.tolerance, "the error of what passed");
  return verified;
}

json message_of(const Timing& timing) {
  return {{"samples_us", timing.samples_us},
          {"abandoned", timing.abandoned},
          {"device_fault", timing.device_fault},
          {"failure", timing.failure},
          {"fatal", timing.fatal},
          {"killed", timing.killed}};
}

Timing read_timing(const json& message) {
  Timing timing;
  message.at("samples_us").get_to(timing.samples_us);
  for (const double sample : timing.samples_us)
    require(std::isfinite(sample) && sample > 0, "a sample");
  message.at("abandoned").get_to(timing.abandoned);
  message.at("device_fault").get_to(timing.device_fault);
  message.at("failure").get_to(timing.failure);
  message.at("fatal").get_to(timing.fatal);
  message.at("killed").get_to(timing.killed);
  return timing;
}

std::string_view error_kind_name(ErrorKind kind) {
  return value_of(kind, error_kinds);
}

ErrorKind parse_error_kind(std::string_view name) {
  if (const auto kind = find_key(name, error_kinds)) return *kind;
  throw Error(ErrorKind::invalid_input, fmt::format("'{}' is not a kind of error", name));
}

using nlohmann::json;

json answer_to(const json& call, Evaluator& evaluator, const Evaluator::CompileSink& compiled) {
  const auto name = call.at("call").get<std::string>();
  if (name == "limits")
    return message_of(evaluator.limits(parse_dtype(call.at("dtype").get<std::string>())));
  if (name == "disturbances") return evaluator.disturbances();
  if (name == "begin") {
    evaluator.avoid(call.at("avoid").get<std::set<std::string>>());
    return message_of(evaluator.begin(read_problem(call.at("problem"))));
  }
  if (name == "compile") {
    evaluator.compile(read_candidates(call.at("candidates")), compiled);
    return nullptr;
  }
  if (name == "verify") return message_of(evaluator.verify(read_candidate(call.at("candidate"))));
  if (name == "time") {
    json all = json::array();
    for (const auto& timing : evaluator.time(read_candidates(call.at("candidates")),
                                             read_time_request(call.at("request"))))
      all.push_back(message_of(timing));
    return all;
  }
  throw Error(ErrorKind::internal, "a worker was called for what it does not know");
}

json error_reply(const Error& error) {
  return {{"reply", "error"}, {"kind", error_kind_name(error.kind())}, {"text", error.what()}};
}

void serve_calls(LineChannel& channel, const std::function<void(const json&)>& answer) {
  while (!channel.closed()) {
    const auto line = channel.receive(infinity);
    if (!line) continue;
    const json call = json::parse(*line);
    if (call.at("call") != "stop") answer(call);
  }
}

}  // namespace fftune
