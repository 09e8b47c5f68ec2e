// Which groups of variants can serve a problem on a device.
#pragma once

#include <string>
#include <vector>

#include "registry/catalog.hpp"
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

/// Those of `only` that the op's families and fallback families have, all as warm starts.
std::vector<GroupSpec> enumerate_only(const Op& op, const Problem& problem,
                                      const DeviceFacts& facts, const std::vector<Variant>& only);

/// Whether the spans can cover stages 0 to stage_count-1, each once.
bool covers(const std::vector<Span>& spans, std::size_t stage_count);

/// Those of `fallbacks` that serve a stage which `groups` leave out; all if no stage is left out.
std::vector<GroupSpec> fallbacks_needed(const std::vector<Span>& groups,
                                        std::vector<GroupSpec> fallbacks, std::size_t stage_count);

}  // namespace fftune
