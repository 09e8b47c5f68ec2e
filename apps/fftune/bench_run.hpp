// Timing the library's choice against the alternatives that a user could call.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "runtime/choice.hpp"
#include "tuning/evaluate/evaluator.hpp"
#include "tuning/measure/statistics.hpp"

namespace fftune::tool {

struct BenchEntry {
  std::string name;     // "fftune", "untuned", or the baseline's
  std::string summary;  // its recipe, or what the baseline is
  Summary microseconds{};
  Ratio ratio{};          // of its time to fftune's
  std::string failure{};  // one line; empty if it was timed
  double floor_us = 0;    // of a part of the plan: by itself; else 0
  double error = 0;       // against the reference; a baseline's is not measured
  double tolerance = 0;
};

struct BenchResult {
  Problem problem;
  std::string rule;                 // why this recipe
  std::string far;                  // Choice::far
  std::string refusal;              // why nothing was run; empty if it was
  std::vector<BenchEntry> entries;  // fftune first
  double floor_us = 0;              // by the measured limits
  std::string limit;                // "compute" or "memory"
  std::size_t kept_bytes = 0;       // of the forward pass, for this one
  /// Of the last measurement, one line each: it was repeated while there were any.
  std::vector<std::string> disturbances;
};

/// Verifies each, then times all with interleaved samples, on the same buffers and in the same way.
/// Also the untuned default, where it is another recipe. Measured again, up to three times in all,
/// while something disturbs the device. `stages`: and each variant of the library's recipe by
/// itself, and the first two, three and so on in a row.
BenchResult bench(const Catalog& catalog, const Op& op, const Problem& problem,
                  const PresetLibrary& presets, Evaluator& evaluator, const TimeRequest& request,
                  const BurstPlan& plan, bool stages = false);

}  // namespace fftune::tool
