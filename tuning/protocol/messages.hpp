// The values that go between a supervisor and its worker, as JSON. A number that is not finite is
// null. The readers check their input: they throw Error(invalid_input) or json::exception.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "tuning/evaluate/evaluator.hpp"
#include "tuning/protocol/line_channel.hpp"

namespace fftune {

/// One line without its end; bytes that are not UTF-8 (a compiler's words) become U+FFFD.
std::string line_of(const nlohmann::json& message);

nlohmann::json message_of(const DeviceFacts& facts);
nlohmann::json message_of(const Limits& limits);
nlohmann::json message_of(const Problem& problem);
nlohmann::json message_of(const Candidate& candidate);
nlohmann::json message_of(const std::vector<Candidate>& candidates);
nlohmann::json message_of(const TimeRequest& request);
nlohmann::json message_of(const Setup& setup);
nlohmann::json message_of(const Compiled& compiled);
nlohmann::json message_of(const Verified& verified);
nlohmann::json message_of(const Timing& timing);

DeviceFacts read_facts(const nlohmann::json& message);
Limits read_limits(const nlohmann::json& message);
Problem read_problem(const nlohmann::json& message);
Candidate read_candidate(const nlohmann::json& message);
std::vector<Candidate> read_candidates(const nlohmann::json& message);
TimeRequest read_time_request(const nlohmann::json& message);
Setup read_setup(const nlohmann::json& message);
Compiled read_compiled(const nlohmann::json& message);
Verified read_verified(const nlohmann::json& message);
Timing read_timing(const nlohmann::json& message);

/// Kinds of errors by name, so that an Error thrown in a worker is thrown again by its supervisor.
std::string_view error_kind_name(ErrorKind kind);
/// Throws Error(invalid_input).
ErrorKind parse_error_kind(std::string_view name);

// Answers the calls of the protocol from an evaluator: what a worker process and a rank of another
// host have in common (tuning/worker/serve.hpp describes the messages).

/// The value of the answer. `compiled` is called as by Evaluator::compile(). Throws Error or
/// json::exception for a call that is none.
nlohmann::json answer_to(const nlohmann::json& call, Evaluator& evaluator,
                         const Evaluator::CompileSink& compiled);

/// The answer when it threw.
nlohmann::json error_reply(const Error& error);

/// Answers the calls that come, until the channel is closed. A call to stop is not one: what it was
/// to stop had ended.
void serve_calls(LineChannel& channel, const std::function<void(const nlohmann::json&)>& answer);

}  // namespace fftune
