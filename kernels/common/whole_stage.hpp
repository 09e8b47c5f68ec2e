// The stage of an op that has only one.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "registry/op.hpp"

namespace fftune {

/// A stage that reads every input and writes every output, each byte once. Its operations and its
/// reduction length are left to set.
inline StageSpec whole_stage(std::string name, const std::vector<TensorSpec>& tensors) {
  StageSpec stage;
  stage.name = std::move(name);
  for (const auto& tensor : tensors) {
    (tensor.role == Role::input ? stage.inputs : stage.outputs).push_back(tensor.name);
    stage.bytes += static_cast<double>(tensor.bytes());
  }
  return stage;
}

}  // namespace fftune
