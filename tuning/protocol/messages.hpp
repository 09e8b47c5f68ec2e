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

JsonValue message_of(const Problem& problem);
JsonValue message_of(const Candidate& candidate);
JsonValue message_of(const Candidates& candidates);
/// A message of DeviceFacts, Limits, TimeRequest, Setup, Compiled, Verified and Timing.
template <typename Message>
JsonValue message_of(const Message& value);

Problem read_problem(const JsonValue& message);
Candidate read_candidate(const JsonValue& message);
Candidates read_candidates(const JsonValue& message);
template <typename Message>
Message read_message(const JsonValue& message);

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
