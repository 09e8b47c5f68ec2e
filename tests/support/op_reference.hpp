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

/// Test data of a tensor in its dtype: normal values, or what the op draws for seed 1.
std::vector<std::byte> drawn_bytes(const TensorSpec& spec, std::mt19937_64& random);

/// The tensors with the outputs of the first stage of the problem's op.
ReferenceTensors run_reference(const Problem& problem, ReferenceTensors tensors);

}  // namespace fftune::test
