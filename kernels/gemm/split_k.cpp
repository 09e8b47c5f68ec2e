#include "kernels/gemm/split_k.hpp"

#include <algorithm>

namespace fftune {

bool splits_in_clusters(const DeviceFacts& facts) {
  return facts.compute_capability >= 90;
}

void split_launch(Program& program, KernelLaunch& launch, const DeviceFacts& facts, int split_k,
                  std::int64_t share_bytes, std::int64_t kept_bytes) {
  const Argument null = std::int64_t{0};
  launch.grid.y = static_cast<std::uint32_t>(split_k);
  if (split_k == 1 || splits_in_clusters(facts)) {
    launch.cluster.y = launch.grid.y;
    if (split_k > 1) {
      launch.shared_bytes =
          std::max(launch.shared_bytes, static_cast<std::uint32_t>(kept_bytes + share_bytes));
    }
    launch.arguments.insert(launch.arguments.end(), {null, null});
    return;
  }
  const auto tiles = static_cast<std::size_t>(launch.grid.x);
  const std::size_t counters = program.scratch.size();
  program.scratch.push_back({tiles * 4, true});
  program.scratch.push_back({tiles * split_k * static_cast<std::size_t>(share_bytes), false});
  launch.arguments.insert(launch.arguments.end(),
                          {ScratchArgument{counters}, ScratchArgument{counters + 1}});
}

}  // namespace fftune
