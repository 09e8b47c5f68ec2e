// Answers the calls of the protocol from an evaluator: what a worker process and a rank of another
// host have in common (tuning/worker/serve.hpp describes the messages).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "core/error.hpp"
#include "tuning/evaluate/evaluator.hpp"

namespace fftune {

/// The value of the answer. `compiled` is called as by Evaluator::compile(). Throws Error or
/// json::exception for a call that is none.
nlohmann::json answer_to(const nlohmann::json& call, Evaluator& evaluator,
                         const Evaluator::CompileSink& compiled);

/// The answer when it threw.
nlohmann::json error_reply(const Error& error);

}  // namespace fftune
