// Which problems `check` runs: those that any device's preset names, with ragged token counts.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "store/preset_library.hpp"

namespace fftune::tool {

/// A problem that a record names. Several devices' records may name the same.
struct CheckedRecord {
  Problem problem;
  std::vector<std::int64_t> tokens;  // what it is checked at: its own number and ragged ones
  bool capped = false;               // some were lowered to keep the check affordable
  std::string skipped = {};          // why it cannot be checked here; empty if it can
};

/// The problem of a layer: of records that differ in the number of tokens alone.
Problem layer_of(const Op& op, const Problem& problem);

/// The records that `admit` takes, each problem once, sorted. `max_flops` bounds one run of a
/// problem by lowering its number of tokens; 0: no bound.
std::vector<CheckedRecord> checked_records(const PresetLibrary& presets, const Catalog& catalog,
                                           DeviceKind kind, double max_flops,
                                           const std::function<bool(const Problem&)>& admit);

}  // namespace fftune::tool
