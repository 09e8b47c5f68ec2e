// What is called for by a message, of any evaluator: the part of the protocol that a worker and a
// rank of another host have in common (tuning/worker/serve.hpp has its words).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "core/error.hpp"
#include "tuning/evaluator.hpp"

namespace fftune {

/// The value of the answer. `compiled` is called as by Evaluator::compile(). Throws Error or
/// json::exception for a call that is none.
nlohmann::json answer_to(const nlohmann::json& call, Evaluator& evaluator,
                         const Evaluator::CompileSink& compiled);

/// The answer when it threw.
nlohmann::json error_reply(const Error& error);

}  // namespace fftune
