// The references of an op's backward pass against central differences of those of its forward pass.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/pool.hpp"
#include "registry/op.hpp"
#include "support/catch.hpp"

namespace fftune::test {

/// Normal values for every input of the problem that is not there yet.
void draw_inputs(const Op& op, const Problem& problem, std::mt19937_64& random,
                 ReferenceTensors& tensors);

/// Computes the reference of every stage.
void run_stages(const Op& op, const Problem& problem, ReferenceTensors& tensors);

/// Checks every element of every gradient {input, gradient} of the sum of dy ⊙ y. Tensors that the
/// forward pass saves are handed to the backward pass. Inputs that are no noise are `given`.
void check_gradients(const Op& op, const Problem& forward, const Problem& backward,
                     const std::vector<std::pair<std::string, std::string>>& gradients,
                     std::mt19937_64& random, const ReferenceTensors& given = {});

}  // namespace fftune::test
