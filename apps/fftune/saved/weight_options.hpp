// The options that name saved files: whose weights and inputs an op takes.
#pragma once

#include <string>

#include "registry/op.hpp"

namespace fftune::tool {

struct Command;
struct ProblemOptions;

struct WeightOptions {
  std::string weights = {};  // a .safetensors file, an index or a folder
  std::string layer = {};
  std::string input = {};  // a .safetensors file
  std::string map = {};    // "w=model.layers.0.mlp.up_proj.weight,bias=…"

  bool given() const { return !weights.empty() || !input.empty(); }
};

/// Adds --saved-weights, --layer, --input and --map, after the options of an op: --weights is the
/// same as --saved-weights where the op has no option of that name. `values` must live as long as
/// `command` parses.
void add_weight_options(Command& command, WeightOptions& values);
/// Takes a value of the op's own --weights that is a path as --saved-weights. Throws
/// Error(invalid_input) if it is neither a word of that option nor a path.
void take_saved_weights(const Op& op, ProblemOptions& problem, WeightOptions& values);
/// Throws Error(invalid_input) for --layer or --map without what they are about.
void check_weight_options(const WeightOptions& values);

}  // namespace fftune::tool
