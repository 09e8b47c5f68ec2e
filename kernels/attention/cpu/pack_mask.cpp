// pack-mask on the CPU.
#include "kernels/attention/pack_mask.hpp"

#include <algorithm>
#include <array>

#include "kernels/common/cpu_task.hpp"
#include "kernels/common/stage_family.hpp"

namespace fftune::attention {
namespace {

/// Packs the rows from 64 * tile on: their words, and the flags of their tiles.
void pack_tiles(const MaskShape& shape, std::int64_t matrix, std::int64_t tile,
                const std::uint8_t* mask, std::uint32_t* bits, std::uint8_t* flags) {
  const std::int64_t across = quotient_up(shape.kv, mask_tile);
  const std::int64_t down = quotient_up(shape.s, mask_tile);
  const std::int64_t last = std::min(shape.s, (tile + 1) * mask_tile);
  for (std::int64_t column = 0; 64 * column < 32 * shape.words(); ++column) {
    const std::int64_t first = column * mask_tile;
    const std::int64_t keys = std::clamp<std::int64_t>(shape.kv - first, 0, mask_tile);
    bool any = false, all = true;
    for (std::int64_t i = tile * mask_tile; i < last; ++i) {
      const std::int64_t row = matrix * shape.s + i;
      std::array<std::uint32_t, 2> words{};
      std::int64_t allowed = 0;
      for (std::int64_t j = 0; j < keys; ++j) {
        const std::uint32_t bit = mask[row * shape.kv + first + j] != 0 ? 1 : 0;
        words[static_cast<std::size_t>(j / 32)] |= bit << (j % 32);
        allowed += bit;
      }
      any |= allowed > 0;
      all &= allowed == keys;
      std::copy(words.begin(), words.end(), bits + row * shape.words() + 2 * column);
    }
    if (keys > 0)
      flags[(matrix * down + tile) * across + column] = static_cast<std::uint8_t>(!any  ? 0
                                                                                  : all ? 1
                                                                                        : 2);
  }
}

Space space(const Problem&, const DeviceFacts& facts) {
  return Space().parameter("threads", "threads at most", thread_counts(facts));
}

Config default_config(const Problem& problem, const DeviceFacts& facts) {
  const MaskShape shape = mask_shape_of(problem);
  return {{"threads", default_threads(shape.matrices * shape.s, shape.kv, facts)}};
}

Program program(const Problem& problem, const DeviceFacts&, const Config& config) {
  const MaskShape shape = mask_shape_of(problem);
  const int threads = config.get("threads");
  return host_program(PackPlaces::count, [=](const HostCall& call) {
    const auto* const mask = static_cast<const std::uint8_t*>(call.tensors[PackPlaces::mask]);
    auto* const bits = static_cast<std::uint32_t*>(call.tensors[PackPlaces::bits]);
    auto* const flags = static_cast<std::uint8_t*>(call.tensors[PackPlaces::flags]);
    const std::int64_t down = quotient_up(shape.s, mask_tile);
    call.parallel.run(static_cast<int>(shape.matrices * down), threads, [&](int task) {
      pack_tiles(shape, task / down, task % down, mask, bits, flags);
    });
  });
}

}  // namespace

std::vector<const Family*> pack_mask_cpu_families() {
  static const StageFamily pack = cpu_fallback({.name = "cpu_pack",
                                                .summary = "rows of tiles on all threads",
                                                .stage = stage_pack,
                                                .sources = {"attention/cpu/pack_mask.cpp"},
                                                .search = {space, default_config},
                                                .program = program});
  return {&pack};
}

}  // namespace fftune::attention
