// The options that name saved files: whose weights and inputs an op takes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "apps/fftune/command_line/problem_options.hpp"
#include "saved/inputs.hpp"

namespace fftune::tool {

struct Command;

/// Adds --saved-weights, --layer, --input and --map, after the options of an op: --weights is the
/// same as --saved-weights where the op has no option of that name. `values` must live as long as
/// `command` parses.
void add_weight_options(Command& command, SavedValues& values);
/// Takes a value of the op's own --weights that is a path as --saved-weights. Throws
/// Error(invalid_input) if it is neither a word of that option nor a path.
void take_saved_weights(const Op& op, ProblemOptions& problem, SavedValues& values);
/// Throws Error(invalid_input) for --layer or --map without what they are about.
void check_weight_options(const SavedValues& values);
/// The options for a process that is to have the same inputs.
std::vector<std::string> words_of(const SavedInputs& saved);

/// The files that were given; null if none were. Where the op has an option `weights` of its own, a
/// value that is none of its words is the path of a saved model, as of --saved-weights: it is taken
/// out of `problem`. Throws as SavedInputs() and check_weight_options() do, and
/// Error(invalid_input) if the value is neither.
std::unique_ptr<const SavedInputs> saved_inputs(const Catalog& catalog, const Op& op,
                                                ProblemOptions& problem, SavedValues values);

/// Problems that fit the given options and, if it is not null, the saved model. Throws
/// Error(invalid_input).
std::vector<Problem> saved_problems(const Op& op, const ProblemOptions& given,
                                    const SavedInputs* saved, DeviceKind kind);

}  // namespace fftune::tool
