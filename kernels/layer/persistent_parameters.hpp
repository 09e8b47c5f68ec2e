// The parameters of a launch of layer/persistent.cu: the addresses of all layers' tensors.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "device/program.hpp"
#include "kernels/layer/persistent_space.hpp"

namespace fftune::layer {

/// Where the parameters of a token begin.
constexpr std::size_t token_at = sizeof(persistent_common);

/// Adds a group's memory and the problem's tag, of layers on a rank's slice.
void set_ranks(ParameterStruct& parameters, Program& program, const Problem& one,
               const std::vector<std::size_t>& places, std::size_t layers,
               const std::string& expression);

/// `places`: for each layer, which tensor of the program is each of the op layer's. With
/// `whole_token` the state of the sequences stands for positions, slots and lengths.
ParameterStruct parameters_of(const Problem& one, const Layer& layer, std::size_t workspace,
                              const std::vector<std::vector<std::size_t>>& places,
                              bool whole_token);

}  // namespace fftune::layer
