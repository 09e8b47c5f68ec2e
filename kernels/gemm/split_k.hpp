// The launch side of split_k.cuh: how the blocks of a tile meet.
#pragma once

#include <cstdint>

#include "device/facts.hpp"
#include "device/program.hpp"

namespace fftune {

/// From sm_90 on the splits of a tile are a cluster, and need neither workspace nor counters.
bool splits_in_clusters(const DeviceFacts& facts);

/// The most splits a tile can have: 8 blocks are the largest cluster that every device runs.
constexpr int max_split_k = 8;

/// Makes `launch`, whose grid.x counts tiles, run `split_k` blocks a tile: sets grid.y and cluster,
/// and split_k, split_counters and split_partials of the gemm_params that its parameter struct
/// begins with, with their scratch; of a launch of arguments, it appends the last two.
/// `share_bytes` are one block's sums; where they travel through shared memory, after the first
/// `kept_bytes` of it, there will be room for them.
void split_launch(Program& program, KernelLaunch& launch, const DeviceFacts& facts, int split_k,
                  std::int64_t share_bytes, std::int64_t kept_bytes = 0);

}  // namespace fftune
