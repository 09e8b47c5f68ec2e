// The parameters of a launch of layer/persistent.cu: the addresses of all layers' tensors.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "device/program.hpp"
#include "kernels/layer/persistent_space.hpp"

namespace fftune::layer {

/// The layers of one launch.
struct LaunchedLayers {
  /// For each layer, which tensor of the program is each of the op layer's.
  std::vector<std::vector<std::size_t>> places;
  bool first = true, last = true;  // whether those of the plan are among them

  std::size_t count() const { return places.size(); }
};

/// The kernel's workspace is the program's last scratch. The state of the sequences of a decode
/// step, if there is one, stands for positions, slots and lengths. Ranks compare the kernel's
/// `expression`.
ParameterStruct parameters_of(Program& program, const Problem& one, const Layer& layer,
                              const LaunchedLayers& layers, const DecodeStep* step,
                              const std::string& expression);

}  // namespace fftune::layer
