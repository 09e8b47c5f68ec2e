// The launch side of decode.cuh: its space, its geometry, and what to use untuned.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/space.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/gemm/shape.hpp"

namespace fftune {

/// The engine's tokens are one operand of m16n8k16.
constexpr std::int64_t decode_max_tokens = 16;

/// rows, warps, unroll, split_k, with what limits them for this product on this device.
Space decode_space(const GemmShape& shape, const DeviceFacts& facts);

/// The feasible configuration that keeps the most loads in flight on the most multiprocessors.
Config decode_default(const GemmShape& shape, const DeviceFacts& facts);

/// The template arguments that follow the types: tokens, rows, warps, unroll.
std::string decode_template_arguments(const GemmShape& shape, const Config& config);

/// Appends the launch of the program's last kernel: the tensors' addresses `tensors`, then what
/// every kernel of the engine takes: counters, partials, the three `sizes`, split_k.
void decode_launch(Program& program, const GemmShape& shape, const DeviceFacts& facts,
                   const Config& config, std::vector<Argument> tensors,
                   const std::vector<std::int64_t>& sizes);

}  // namespace fftune
