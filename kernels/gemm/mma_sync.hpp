// The launch side of mma_sync.cuh: its space, its geometry, and what to use untuned.
#pragma once

#include <cstdint>
#include <string>

#include "core/space.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/gemm/shape.hpp"

namespace fftune {

/// bm, bn, bk, warps_m, warps_n, stages, split_k, group_m, with what limits them for this product
/// on this device. `bn` counts columns of the output: with two products a block computes 2 bn.
Space mma_sync_space(const GemmShape& shape, const DeviceFacts& facts);

/// The feasible configuration of least mma_sync_cost().
Config mma_sync_default(const GemmShape& shape, const DeviceFacts& facts);

/// An estimate of the clock cycles a configuration takes, good enough to rank.
double mma_sync_cost(const GemmShape& shape, const DeviceFacts& facts, const Config& config);

/// Dynamic shared memory of a block, in bytes: mma_sync_gemm::shared_bytes.
std::int64_t mma_sync_shared_bytes(const Config& config, int products);

/// The template arguments that follow the types: "128, 64, 64, 2, 2, 3".
std::string mma_sync_template_arguments(const Config& config);

/// Appends the launch of the program's last kernel: the tensors' addresses `tensors`, then what
/// every kernel of the engine takes: counters, partials, the three `sizes`, split_k, group_m.
void mma_sync_launch(Program& program, const GemmShape& shape, const DeviceFacts& facts,
                     const Config& config, std::vector<Argument> tensors,
                     const std::vector<std::int64_t>& sizes);

}  // namespace fftune
