#include "kernels/gemm/split_k.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "kernels/gemm/params.cuh"

namespace fftune {

bool splits_in_clusters(const DeviceFacts& facts) {
  return facts.compute_capability >= 90;
}

void split_launch(Program& program, KernelLaunch& launch, const DeviceFacts& facts, int split_k,
                  std::int64_t share_bytes, std::int64_t kept_bytes) {
  const auto set = [&launch](std::size_t offset, Argument value) {
    launch.parameters->fields.push_back({offset, std::move(value)});
  };
  set(offsetof(gemm_params, split_k), std::int32_t{split_k});
  launch.grid.y = static_cast<std::uint32_t>(split_k);
  if (split_k == 1 || splits_in_clusters(facts)) {
    launch.cluster.y = launch.grid.y;
    if (split_k > 1)
      launch.shared_bytes =
          std::max(launch.shared_bytes, static_cast<std::uint32_t>(kept_bytes + share_bytes));
    return;
  }
  const auto tiles = static_cast<std::size_t>(launch.grid.x);
  set(offsetof(gemm_params, split_counters), ScratchArgument{program.scratch.size()});
  program.scratch.push_back({tiles * 4, true});
  set(offsetof(gemm_params, split_partials), ScratchArgument{program.scratch.size()});
  program.scratch.push_back({tiles * split_k * static_cast<std::size_t>(share_bytes), false});
}

}  // namespace fftune
