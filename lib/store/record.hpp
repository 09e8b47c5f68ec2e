// A preset record: the winner of a problem on a device, how sure that is, and its provenance.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/problem.hpp"
#include "device/facts.hpp"
#include "registry/variant.hpp"

namespace fftune {

/// A variant with its time, for the ties and the runners-up.
struct Timed {
  std::string id;  // of the variant, or of the recipe
  double median_us = 0;
  std::string bits{};  // StageRecord::bits of this one; empty if unknown
};

/// The winner of one stage, or of the stages that one family covers.
struct StageRecord {
  std::vector<std::string> stages;
  Variant variant;
  std::string source_hash;  // SourceSet::hash(family.sources())
  double median_us = 0;
  std::string bits{};               // hash of what it writes on the sweep's input; empty if unknown
  std::vector<Timed> ties{};        // not told from the best, the winner left out
  std::vector<Timed> runners_up{};  // the next best, at most three
  int feasible = 0;
  int measured = 0;
  int failed = 0;
};

struct Verdict {
  double median_us = 0;        // of the whole op, all stages in one graph
  double interval_low_us = 0;  // 95% confidence interval of the median
  double interval_high_us = 0;
  double noise = 0;              // relative spread of repeated medians of one plan
  double roofline_fraction = 0;  // the floor's time over the median
  std::string limit;             // "compute" or "memory": the term that sets the floor
  double unfused_ratio = 0;      // the unfused pipeline's time over the median; 0 if not measured
  std::string strategy;
  bool complete = true;           // false when the budget or the user ended the search early
  std::optional<bool> decided{};  // whether the ties are all within the tie band, beyond doubt
  std::vector<std::string> disturbances{};  // of the measurement, by others on the device
  std::optional<double> untuned_ratio{};    // the untuned choice's time over the median
};

struct Provenance {
  std::string fftune;  // version
  std::string device;  // DeviceFacts::name
  std::string driver;
  std::string toolkit;
  double clock_mhz = 0;
  std::string date;  // UTC, "2026-11-21T14:03:22Z"
  std::uint64_t seed = 0;
};

/// Provenance of a record that is made now, on this device.
Provenance provenance_now(const DeviceFacts& facts, std::uint64_t seed);

struct PresetRecord {
  Problem problem;
  std::vector<StageRecord> stages;
  Verdict verdict{};
  double error = 0;  // relative, against the float64 reference
  double tolerance = 0;
  Provenance provenance;

  Recipe recipe() const;
};

/// A preset file's description of its device, for matching another one against it.
struct PresetDevice {
  std::string slug;
  std::string name;
  DeviceKind kind = DeviceKind::cpu;
  std::string arch;
  int multiprocessors = 0;
  std::vector<std::string> aliases;  // names of devices that behave the same
};
PresetDevice preset_device(const DeviceFacts& facts);

// How problems of an op are compared where records are looked up and merged.

class Op;
struct Catalog;

/// Which size counts the tokens, which options are numbers and patterns, and which sizes and
/// options are performance-neutral (OptionField, SizeField). Another option's value is a word,
/// whatever it reads like.
struct Comparison {
  std::string token_size;
  std::set<std::string> numbers{};
  std::set<std::string> patterns{};
  std::set<std::string> neutral{};
  /// Makes problems that say the same the same problem: rare sizes are left out where that means
  /// their value, but stated where the op compares them anyway. Empty: they stay as they are.
  std::function<Problem(Problem)> unified{};
};

Comparison comparison_of(const Op& op);
/// Comparison of an op by its name; if the catalog lacks the op, every field counts.
Comparison comparison_of(const Catalog& catalog, std::string_view op);

/// The unified problem without its performance-neutral fields. Records for which this is the same
/// serve the same problems equally well: a file needs one of them.
Problem compared_part(const Problem& problem, const Comparison& comparison);

/// The records by compared_part() of their problems. If several have the same, the one measured
/// last is kept; if they are equally old, the last in order.
std::map<Problem, PresetRecord> by_compared_part(const std::vector<PresetRecord>& records,
                                                 const Comparison& comparison);

}  // namespace fftune
