// The stage of an op that has only one.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "registry/op.hpp"

namespace fftune {

/// A stage that reads every input and writes every output, each byte once, and what it updates both
/// ways. Its operations and its reduction length are left to set.
inline StageSpec whole_stage(std::string name, const std::vector<TensorSpec>& tensors) {
  StageSpec stage;
  stage.name = std::move(name);
  for (const auto& tensor : tensors) {
    const auto pass = [&](std::vector<std::string>& names) {
      names.push_back(tensor.name);
      stage.bytes += static_cast<double>(tensor.bytes());
    };
    if (tensor.role != Role::output) pass(stage.inputs);
    if (tensor.role != Role::input) pass(stage.outputs);
  }
  return stage;
}

}  // namespace fftune
