// The parameter l2_prefetch of the row kernels that, launched by programmatic dependent launch, can
// prefetch their first rows to L2 before griddepcontrol.wait (common/dependency.cuh).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/space.hpp"
#include "device/facts.hpp"

namespace fftune {

/// Whether a kernel whose rows are so many bytes apart, or a multiple of that, can prefetch them:
/// it needs programmatic dependent launch, and cp.async.bulk.prefetch.L2 takes multiples of 16
/// bytes.
inline bool can_prefetch_l2(const DeviceFacts& facts, std::int64_t row_alignment) {
  return facts.compute_capability >= 90 && row_alignment % 16 == 0;
}

/// Whether so many threads, those of all blocks, leave half of every SM free: all blocks are then
/// resident beside those of the kernel before.
inline bool all_resident(const DeviceFacts& facts, std::int64_t threads) {
  return threads <= 1024 * std::int64_t{facts.multiprocessors};
}

/// Adds the parameter l2_prefetch. `can`: can_prefetch_l2(). `threads`: of all blocks of a
/// configuration; it reads the parameters `reads`.
inline void add_l2_prefetch(Space& space, const DeviceFacts& facts, bool can,
                            std::function<std::int64_t(const Config&)> threads,
                            std::vector<std::string> reads) {
  reads.emplace_back("l2_prefetch");
  space
      .parameter(
          "l2_prefetch",
          "1: the first rows are prefetched to L2 before griddepcontrol.wait; 0: no prefetch",
          {0, 1})
      .constraint("the L2 prefetch needs programmatic dependent launch, and rows of whole 16 bytes",
                  [can](const Config& c) { return c.at("l2_prefetch") == 0 || can; },
                  {"l2_prefetch"})
      .constraint(
          "the L2 prefetch is in time only if all blocks are resident beside the kernel before",
          [facts, threads = std::move(threads)](const Config& c) {
            return c.at("l2_prefetch") == 0 || all_resident(facts, threads(c));
          },
          std::move(reads));
}

}  // namespace fftune
