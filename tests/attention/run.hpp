// Attention on given values: any family on a device.
#pragma once

#include <cmath>
#include <cstddef>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "attention/problems.hpp"
#include "device/backend.hpp"
#include "support/op_reference.hpp"

namespace fftune::test {

/// Values for every input that is not there yet: what the op draws, or normal ones.
void draw_inputs(const Problem& problem, std::mt19937_64& random, ReferenceTensors& tensors);

/// Values as a tensor of the dtype holds them.
std::vector<double> rounded(DType dtype, const std::vector<double>& values);

/// Adds the outputs of a compiled family, whose buffers begin as NaN, to the inputs.
ReferenceTensors run_compiled(Backend& backend, const Executable& executable,
                              const Problem& problem, ReferenceTensors tensors, void* workspace);

/// Memory for one run at a time.
std::unique_ptr<Buffer> workspace_of(Backend& backend, const Executable& executable);

/// Compiles and runs a family.
ReferenceTensors run_family(Backend& backend, const Family& family, const Config& config,
                            const Problem& problem, ReferenceTensors tensors);

/// Calls visit(family, default configuration) for each family that serves the problem.
template <typename Visit>
void for_each_family(const DeviceFacts& facts, const Problem& problem, const Visit& visit) {
  for (const Family* family : attention_op().families())
    if (family->device_kind() == facts.kind && !family->refusal(problem, facts))
      visit(*family, family->default_config(problem, facts));
}

/// The norm of the difference over the norm of the second; infinities have to be equal.
double relative_error(const std::vector<double>& values, const std::vector<double>& reference);

}  // namespace fftune::test
