// The loop of a worker process: an evaluator's calls read from the channel, answers written to it.
// One line of JSON a message. Calls: {"call": "limits" | "begin" | "compile" | "verify" | "time" |
// "disturbances", …}. Each ends with {"reply": "done", "value": …, "lost": why the device is lost}
// or {"reply": "error", "kind": …, "text": …}. Before the end of a compile there may be
// {"reply": "begun" | "compiled", "index": …}, and of a begin {"reply": "trying", "candidate": …}.
// The first message is the worker's: done, with the device's facts and warnings.
#pragma once

#include <functional>
#include <memory>

#include "registry/catalog.hpp"
#include "tuning/evaluate/evaluator.hpp"
#include "verify/input_data.hpp"

namespace fftune {

/// Serves on the descriptors that the supervisor left open, until it closes the channel; returns
/// the exit code of the process. `open` opens the device; an Error that it throws goes to the
/// supervisor.
int serve_worker(const Catalog& catalog, InputData data,
                 const std::function<std::unique_ptr<Backend>()>& open);

}  // namespace fftune
