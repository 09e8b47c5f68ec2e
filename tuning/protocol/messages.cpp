#include "tuning/protocol/messages.hpp"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <concepts>
#include <limits>
#include <set>
#include <string>
#include <type_traits>
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

void require(bool holds, const char* what) {
  if (!holds) throw Error(ErrorKind::invalid_input, fmt::format("{} is out of range", what));
}

/// Takes the members of a struct into a message. `if_null` is for the reader.
struct Writer {
  JsonValue& message;

  template <typename T>
  void operator()(const char* name, const T& value, double /*if_null*/ = 0) const {
    if constexpr (std::same_as<T, double>)
      message[name] = finite(value);
    else
      message[name] = value;
  }
};

/// Takes them from it. A number that is null becomes `if_null`; a count is not negative.
struct Reader {
  const JsonValue& message;

  template <typename T>
  void operator()(const char* name, T& value, double if_null = 0) const {
    const JsonValue& found = member(message, name);
    if constexpr (std::same_as<T, double>) {
      value = found.get_if<std::nullptr_t>() ? if_null : value_as<double>(found);
    } else {
      value = value_as<T>(found);
      if constexpr (std::same_as<T, int>) require(value >= 0, name);
    }
  }
};

/// The members of each message, in the order of its text, once for both directions.
template <class M, class T>
concept Of = std::same_as<std::remove_const_t<M>, T>;

void members(Of<DeviceFacts> auto& facts, const auto& field) {
  field("name", facts.name);
  field("arch", facts.arch);
  field("compute_capability", facts.compute_capability);
  field("multiprocessors", facts.multiprocessors);
  field("registers_per_multiprocessor", facts.registers_per_multiprocessor);
  field("shared_bytes_per_block", facts.shared_bytes_per_block);
  field("shared_bytes_per_multiprocessor", facts.shared_bytes_per_multiprocessor);
  field("l2_bytes", facts.l2_bytes);
  field("memory_bytes", facts.memory_bytes);
  field("memory_bandwidth", facts.memory_bandwidth);
  field("clock_hz", facts.clock_hz);
  field("driver", facts.driver);
  field("toolkit", facts.toolkit);
}
void members(Of<Limits> auto& limits, const auto& field) {
  field("bytes_per_second", limits.bytes_per_second);
  field("flops_per_second", limits.flops_per_second);
  field("method", limits.method);
}
void members(Of<TimeRequest> auto& request, const auto& field) {
  field("samples", request.samples);
  field("seconds", request.seconds, infinity);
  field("abandon_above_us", request.abandon_above_us, infinity);
}
void members(Of<Setup> auto& setup, const auto& field) {
  field("buffer_sets", setup.buffer_sets);
  field("bytes_per_set", setup.bytes_per_set);
  field("refusal", setup.refusal);
  field("left_out", setup.left_out);
  field("for_now", setup.for_now);
}
/// Why a candidate failed.
void failure_members(auto& result, const auto& field) {
  field("failure", result.failure);
  field("fatal", result.fatal);
  field("killed", result.killed);
}
void members(Of<Compiled> auto& compiled, const auto& field) {
  field("registers", compiled.registers);
  field("spill_bytes", compiled.spill_bytes);
  field("shared_bytes", compiled.shared_bytes);
  field("seconds", compiled.seconds);
  field("cached", compiled.cached);
  field("warnings", compiled.warnings);
  failure_members(compiled, field);
}
void members(Of<Verified> auto& verified, const auto& field) {
  field("passed", verified.passed);
  field("error", verified.error, infinity);
  field("tolerance", verified.tolerance);
  field("device_fault", verified.device_fault);
  field("wrote_beyond", verified.wrote_beyond);
  field("bits", verified.bits);
  field("cancelled", verified.cancelled);
  failure_members(verified, field);
}
void members(Of<Timing> auto& timing, const auto& field) {
  field("samples_us", timing.samples_us);
  field("abandoned", timing.abandoned);
  field("device_fault", timing.device_fault);
  failure_members(timing, field);
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

template <typename Message>
JsonValue message_of(const Message& value) {
  JsonValue message;
  if constexpr (std::same_as<Message, DeviceFacts>)
    message["kind"] = value.kind == DeviceKind::cuda ? "cuda" : "cpu";
  members(value, Writer{message});
  if constexpr (std::same_as<Message, DeviceFacts>) message["details"] = value.details;
  return message;
}

template <typename Message>
Message read_message(const JsonValue& message) {
  Message value;
  members(value, Reader{message});
  if constexpr (std::same_as<Message, DeviceFacts>) {
    const auto kind = field_as<std::string>(message, "kind");
    require(kind == "cuda" || kind == "cpu", "kind");
    value.kind = kind == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
    const auto* const details = member(message, "details").get_if<JsonValue::Object>();
    require(details != nullptr, "details");
    for (const auto& [name, text] : *details)
      value.details.emplace_back(name, value_as<std::string>(text));
  } else if constexpr (std::same_as<Message, Limits>) {
    require(value.bytes_per_second >= 0 && value.flops_per_second >= 0, "a ceiling");
  } else if constexpr (std::same_as<Message, Verified>) {
    require(value.passed == value.failure.empty(), "a verdict with its reason");
    require(!value.passed || value.error <= value.tolerance, "the error of what passed");
  } else if constexpr (std::same_as<Message, Timing>) {
    for (const double sample : value.samples_us)
      require(std::isfinite(sample) && sample > 0, "a sample");
  }
  return value;
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
  read_field(message, "first_stage", candidate.first_stage);
  for (const auto& id : field_as<std::vector<std::string>>(message, "recipe"))
    candidate.recipe.push_back(Variant::parse(id));
  read_field(message, "baseline", candidate.baseline);
  return candidate;
}

JsonValue message_of(const Candidates& candidates) {
  JsonValue::Array all;
  for (const auto& candidate : candidates) all.push_back(message_of(candidate));
  return all;
}

Candidates read_candidates(const JsonValue& message) {
  Candidates candidates;
  for (const auto& each : items_of(message)) candidates.push_back(read_candidate(each));
  return candidates;
}

template JsonValue message_of(const DeviceFacts&);
template JsonValue message_of(const Limits&);
template JsonValue message_of(const TimeRequest&);
template JsonValue message_of(const Setup&);
template JsonValue message_of(const Compiled&);
template JsonValue message_of(const Verified&);
template JsonValue message_of(const Timing&);
template DeviceFacts read_message(const JsonValue&);
template Limits read_message(const JsonValue&);
template TimeRequest read_message(const JsonValue&);
template Setup read_message(const JsonValue&);
template Compiled read_message(const JsonValue&);
template Verified read_message(const JsonValue&);
template Timing read_message(const JsonValue&);

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
                                             read_message<TimeRequest>(member(call, "request"))))
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
