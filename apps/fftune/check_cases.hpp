// Which problems `check` runs: those that any device's preset names, with ragged token counts.
#pragma once

#include <cstddef>
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
  bool own = false;                  // a record of this very device
};

/// The problem of a layer: of records that differ in the number of tokens alone.
Problem layer_of(const Op& op, const Problem& problem);

/// The records that `admit` takes, each problem once, sorted. `max_flops` bounds one run of a
/// problem by lowering its number of tokens; 0: no bound.
std::vector<CheckedRecord> checked_records(const PresetLibrary& presets, const Catalog& catalog,
                                           DeviceKind kind, double max_flops,
                                           const std::function<bool(const Problem&)>& admit);

/// Records of this very device come first: the library loads them here most often.
void put_own_first(const std::vector<PresetFile>& presets, const DeviceFacts& facts,
                   std::vector<CheckedRecord>& records);

/// Keeps, for each op, pass and dtype, the record of least work (this device's, if it has one). It
/// is checked at its own number of tokens alone, or at fewer until it moves no more than
/// `max_bytes` (0: no bound). The others are left out, and so are records that cannot be checked
/// here.
void keep_quick(const Catalog& catalog, double max_bytes, std::vector<CheckedRecord>& records);

/// Skips problems whose tensors exceed the device's free bytes, or whose data exceed the host's.
void skip_too_large(const Catalog& catalog, std::size_t device_bytes, std::size_t host_bytes,
                    std::vector<CheckedRecord>& records);

/// Rough time of making the data, the reference and the runs of one problem with one seed: good for
/// sharing out a progress bar and for telling a minute from an hour.
double estimated_seconds(const Op& op, const Problem& problem, DeviceKind kind);

}  // namespace fftune::tool
