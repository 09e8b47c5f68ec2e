// What rmsnorm's CUDA families share.
#pragma once

#include <string>

#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"

namespace fftune::rmsnorm {

/// A tensor's address, or a null pointer for one that the options leave out.
Argument tensor_or_null(std::size_t place);

/// "fftune::bf16, float, fftune::llama_norm, true, false": what every kernel's template arguments
/// begin with. The booleans are whether a residual is added and whether rstd is saved.
std::string template_arguments(const Layer& layer);

/// The arguments of every forward kernel, in order, and of the backward kernels that write dx to
/// `third`: partial sums, or reciprocal deviations.
std::vector<Argument> forward_arguments(const Layer& layer);
std::vector<Argument> backward_arguments(const Layer& layer, const Argument& third);

/// Adds the kernel `name` of `file`, which adds up partial [rows, d] of scratch area `partial` to
/// dw: the second step of dw's sum. On compute capability 9.0 its blocks may start early.
void append_weight_sum(Program& program, const Layer& layer, const DeviceFacts& facts,
                       const std::string& file, const std::string& name, std::size_t partial,
                       std::int64_t rows);

}  // namespace fftune::rmsnorm
