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
  const Argument null = std::int64_t{0};
  const auto set = [&launch](std::size_t offset, Argument value) {
    launch.parameters->fields.push_back({offset, std::move(value)});
  };
  if (launch.parameters) set(offsetof(gemm_params, split_k), std::int32_t{split_k});
  launch.grid.y = static_cast<std::uint32_t>(split_k);
  if (split_k == 1 || splits_in_clusters(facts)) {
    launch.cluster.y = launch.grid.y;
    if (split_k > 1) {
      launch.shared_bytes =
          std::max(launch.shared_bytes, static_cast<std::uint32_t>(kept_bytes + share_bytes));
    }
    if (!launch.parameters) launch.arguments.insert(launch.arguments.end(), {null, null});
    return;
  }
  const auto tiles = static_cast<std::size_t>(launch.grid.x);
  const std::size_t counters = program.scratch.size();
  program.scratch.push_back({tiles * 4, true});
  program.scratch.push_back({tiles * split_k * static_cast<std::size_t>(share_bytes), false});
  if (launch.parameters) {
    set(offsetof(gemm_params, split_counters), ScratchArgument{counters});
    set(offsetof(gemm_params, split_partials), ScratchArgument{counters + 1});
    return;
  }
  launch.arguments.insert(launch.arguments.end(),
                          {ScratchArgument{counters}, ScratchArgument{counters + 1}});
}

}  // namespace fftune
