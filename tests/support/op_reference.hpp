// An op as its own tests look at it: its entry in the catalog, its tensors, its reference.
#pragma once

#include <cstddef>
#include <map>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "support/fields.hpp"
#include "verify/host_threads.hpp"

namespace fftune::test {

/// The op is in the catalog. Its families have names of their own, and every source that they name
/// is embedded.
void check_registration(const Op& op);

std::vector<std::string> tensor_names(const Problem& problem);

/// Normal values of one tensor after the other.
template <class Random>
struct NormalValues {
  Random random;
  std::normal_distribution<double> normal = {};

  std::vector<double> operator()(std::size_t count) {
    std::vector<double> values(count);
    for (double& value : values) value = normal(random);
    return values;
  }
};

/// Test data of a tensor in its dtype: normal values, or what the op draws for seed 1.
std::vector<std::byte> drawn_bytes(const TensorSpec& spec, std::mt19937_64& random);

/// The tensors with the outputs of the first stage of the problem's op.
ReferenceTensors run_reference(const Problem& problem, ReferenceTensors tensors);

}  // namespace fftune::test
