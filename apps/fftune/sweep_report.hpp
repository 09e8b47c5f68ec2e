// The result of a sweep, as the table a person acts on and as JSON.
#pragma once

#include <string>
#include <vector>

#include "apps/fftune/json.hpp"
#include "apps/fftune/output.hpp"
#include "tuning/tuner.hpp"

namespace fftune::tool {

/// m, the winner of each stage, median, fraction of the roofline and its limit, times faster than
/// the unfused pipeline, ties and how many ran; then what a person should know of each problem.
void print_sweep(const std::vector<TuneResult>& results, const std::string& token_size,
                 const Output& output);

Json sweep_json(const std::vector<TuneResult>& results);

/// One line that says what to do about the problems that are undecided because the machine was
/// busy; empty if there are none.
std::string busy_advice(const std::vector<TuneResult>& results, const std::string& token_size);

/// Whether nothing was tried: the problem does not fit, or no family serves it.
bool was_refused(const TuneResult& result);

}  // namespace fftune::tool
