#include "kernels/attention/cpu/space.hpp"

#include <algorithm>

#include "kernels/common/cpu_task.hpp"
#include "kernels/gemm/cpu/work.hpp"

namespace fftune::attention {

Space block_space(const Layer& layer, const DeviceFacts& facts) {
  return Space()
      .parameter("block_q", "queries of a block", gemm_cpu::up_to(layer.s, {16, 32, 64, 128, 256}))
      .parameter("block_k", "keys that it sees at a time",
                 gemm_cpu::up_to(layer.kv, {64, 128, 256, 512, 1024}))
      .parameter("threads", "threads, each with products of its own", thread_counts(facts));
}

Config default_blocks(const Layer& layer, const DeviceFacts& facts) {
  // Large products, whose scores stay in the L2 cache, and blocks for every thread.
  const std::int64_t queries = layer.layout == Layout::thd ? layer.s / layer.b : layer.s;
  const Space space = block_space(layer, facts);
  std::int64_t rows = 16;
  for (const std::int64_t value : space.parameters()[0].numbers())
    if (value <= 128 &&
        layer.b * layer.heads * ceil_div(queries, value) >= 2 * facts.multiprocessors)
      rows = value;
  std::int64_t columns = 64;
  for (const std::int64_t value : space.parameters()[1].numbers())
    if (value * rows <= 65536 && value <= 512) columns = value;
  return {{"block_q", rows}, {"block_k", columns}, {"threads", facts.multiprocessors}};
}

}  // namespace fftune::attention
