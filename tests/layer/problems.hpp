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

/// Those of a layer of Llama's form with 4 heads of queries and 2 of keys and values; and `more`.
Sizes llama_sizes(std::int64_t d, std::int64_t h, std::int64_t dim, Sizes more);

/// Why a GPU has no layer of bf16 with these, or "".
std::string layer_complaint(const Sizes& sizes, const Options& options = {});

bool mentions(const std::string& text, const std::string& part);

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
