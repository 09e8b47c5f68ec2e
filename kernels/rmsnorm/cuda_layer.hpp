// What rmsnorm's CUDA families share.
#pragma once

#include <string>

#include "device/program.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"

namespace fftune::rmsnorm {

/// "fftune::bf16, float, fftune::llama_norm, true, false": what every kernel's template arguments
/// begin with. The booleans are whether a residual is added and whether rstd is saved.
std::string template_arguments(const Layer& layer);

/// The arguments of every forward kernel, in order, and of the backward kernels that write dx to
/// `third`: partial sums, or reciprocal deviations.
std::vector<Argument> forward_arguments(const Layer& layer);
std::vector<Argument> backward_arguments(const Layer& layer, const Argument& third);

}  // namespace fftune::rmsnorm
