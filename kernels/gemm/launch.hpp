// From a GemmProblem's names to a kernel's parameters: gemm_params (params.cuh) filled in by name.
#pragma once

#include <cstddef>

#include "device/program.hpp"
#include "kernels/common/tensor_places.hpp"
#include "kernels/gemm/params.cuh"
#include "kernels/gemm/problem.hpp"

namespace fftune {

/// The tensor of that name; it must be there.
TensorArgument tensor_of(const TensorPlaces& places, std::string_view name);

/// The sizes, and the address of every tensor of the problem, as fields of a gemm_params that lies
/// `offset` bytes into the kernel's struct of `bytes`. group_m and what belongs to split-K are left
/// to the engine.
ParameterStruct gemm_parameters(const GemmProblem& gemm, const TensorPlaces& places,
                                std::size_t bytes = sizeof(gemm_params), std::size_t offset = 0);

}  // namespace fftune
