// The tunable `early` of the row kernels that can ask L2 for their first rows before their turn
// (common/dependency.cuh).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/space.hpp"
#include "device/facts.hpp"

namespace fftune {

/// Whether a kernel may ask early where all its rows are so many bytes apart, or a multiple of
/// that: it starts before its turn, and L2 is asked for 16 bytes at least.
inline bool can_ask_early(const DeviceFacts& facts, std::int64_t row_alignment) {
  return facts.compute_capability >= 90 && row_alignment % 16 == 0;
}

/// Whether so many threads, those of all blocks, leave half of every SM free.
inline bool run_at_once(const DeviceFacts& facts, std::int64_t threads) {
  return threads <= 1024 * std::int64_t{facts.multiprocessors};
}

/// Adds the parameter `early`. `can`: can_ask_early(). `threads`: of all blocks of a configuration;
/// it reads the parameters `reads`.
inline void add_early(Space& space, const DeviceFacts& facts, bool can,
                      std::function<std::int64_t(const Config&)> threads,
                      std::vector<std::string> reads) {
  reads.emplace_back("early");
  space
      .parameter("early", "L2 is asked for the first rows before the kernel's turn: 1, or not: 0",
                 {0, 1})
      .constraint("only kernels that may start before their turn can ask early, by 16 bytes",
                  [can](const Config& c) { return c.at("early") == 0 || can; }, {"early"})
      .constraint(
          "all blocks run at once, beside those of the kernel before: later ones ask late",
          [facts, threads = std::move(threads)](const Config& c) {
            return c.at("early") == 0 || run_at_once(facts, threads(c));
          },
          std::move(reads));
}

}  // namespace fftune
