// Problems of layer for tests.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/layer/layer.hpp"
#include "support/fields.hpp"

namespace fftune::test {

using Names = std::vector<std::string>;

Problem layer_problem(DeviceKind kind, DType dtype, Sizes sizes, Options options = {});

/// Why a GPU has no layer of bf16 with these, or "".
std::string layer_complaint(const Sizes& sizes, const Options& options = {});

/// A model's layer, in the form that it has, with sizes of its own.
struct SmallModel {
  const char* name;
  Sizes sizes;
  Options options;
};

std::vector<SmallModel> small_models();
/// Those that no decode step and no slices of ranks have.
std::vector<SmallModel> models_with_more_inputs();

}  // namespace fftune::test
