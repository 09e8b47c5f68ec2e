// Which groups of variants can serve a problem on a device.
#pragma once

#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "registry/family.hpp"
#include "tuning/search/group.hpp"

namespace fftune {

struct Enumeration {
  std::vector<GroupSpec> groups;      // in the order of their spans
  std::vector<std::string> refusals;  // "family: why it cannot implement the problem"
};

/// Variants to try first, besides the families' defaults. Variants that are not legal are skipped.
struct WarmStarts {
  Recipe on_record;  // before the defaults
  Recipe others;     // behind them
};

/// The feasible variants of the op's families, or of its fallback families, grouped by the stages
/// that they cover. Each group begins with its warm starts: `first` and the families' defaults.
Enumeration enumerate(const Op& op, const Problem& problem, const DeviceFacts& facts,
                      const WarmStarts& first, bool fallbacks);

/// Those of `only` that the op's families and fallback families have, all as warm starts, in the
/// order of `only`.
std::vector<GroupSpec> enumerate_only(const Op& op, const Problem& problem,
                                      const DeviceFacts& facts, const std::vector<Variant>& only);

/// Whether the spans can cover stages 0 to stage_count-1, each once.
bool covers(const std::vector<Span>& spans, std::size_t stage_count);

/// Those of `fallbacks` that serve a stage which `groups` leave out; all if no stage is left out.
std::vector<GroupSpec> fallbacks_needed(const std::vector<Span>& groups,
                                        std::vector<GroupSpec> fallbacks, std::size_t stage_count);

// The cost model: the predicted time of a variant, before anything is measured.

/// Predicted time in µs, good enough to rank: the family's own estimate, or one from its launches:
/// waves of blocks, and threads whose loads are in flight. `floor_us` is the roofline's floor of
/// what it computes. Positive; the floor itself for CPU families.
double cost_model_us(const Family& family, const Problem& problem, const DeviceFacts& facts,
                     const Config& config, double floor_us);

/// Traits of the family's first launch, as numbers that grow evenly with each doubling: all
/// threads, those of a block, and a block's dynamic shared memory. Zeros for a CPU family.
std::vector<double> launch_traits(const Family& family, const Problem& problem,
                                  const DeviceFacts& facts, const Config& config);

}  // namespace fftune
