// The values that go between a supervisor and its worker, as JSON. A number that is not finite is
// null. The readers check their input: they throw Error(invalid_input).
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "store/json.hpp"
#include "tuning/evaluate/evaluator.hpp"
#include "tuning/protocol/line_channel.hpp"

namespace fftune {

/// One line without its end; bytes that are not UTF-8 (a compiler's words) become U+FFFD.
std::string line_of(const JsonValue& message);

JsonValue message_of(const DeviceFacts& facts);
JsonValue message_of(const Limits& limits);
JsonValue message_of(const Problem& problem);
JsonValue message_of(const Candidate& candidate);
JsonValue message_of(const std::vector<Candidate>& candidates);
JsonValue message_of(const TimeRequest& request);
JsonValue message_of(const Setup& setup);
JsonValue message_of(const Compiled& compiled);
JsonValue message_of(const Verified& verified);
JsonValue message_of(const Timing& timing);

DeviceFacts read_facts(const JsonValue& message);
Limits read_limits(const JsonValue& message);
Problem read_problem(const JsonValue& message);
Candidate read_candidate(const JsonValue& message);
std::vector<Candidate> read_candidates(const JsonValue& message);
TimeRequest read_time_request(const JsonValue& message);
Setup read_setup(const JsonValue& message);
Compiled read_compiled(const JsonValue& message);
Verified read_verified(const JsonValue& message);
Timing read_timing(const JsonValue& message);

/// Kinds of errors by name, so that an Error thrown in a worker is thrown again by its supervisor.
std::string_view error_kind_name(ErrorKind kind);
/// Throws Error(invalid_input).
ErrorKind parse_error_kind(std::string_view name);

// Answers the calls of the protocol from an evaluator: what a worker process and a rank of another
// host have in common (tuning/worker/serve.hpp describes the messages).

/// The value of the answer. `compiled` is called as by Evaluator::compile(). Throws Error for a
/// call that is none.
JsonValue answer_to(const JsonValue& call, Evaluator& evaluator,
                    const Evaluator::CompileSink& compiled);

/// The answer when it threw.
JsonValue error_reply(const Error& error);

/// Answers the calls that come, until the channel is closed. A call to stop is not one: what it was
/// to stop had ended.
void serve_calls(LineChannel& channel, const std::function<void(const JsonValue&)>& answer);

}  // namespace fftune
