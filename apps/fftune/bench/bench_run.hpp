// The measurements of `fftune bench`, and with --against beside those of an earlier run.
#pragma once

#include <atomic>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "apps/fftune/presets/comparison.hpp"
#include "apps/fftune/terminal/json.hpp"
#include "apps/fftune/terminal/output.hpp"
#include "apps/fftune/terminal/text_table.hpp"
#include "core/problem.hpp"
#include "device/facts.hpp"
#include "measure/statistics.hpp"
#include "registry/catalog.hpp"
#include "runtime/choice.hpp"
#include "tuning/evaluate/evaluator.hpp"

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
  /// One line each, from the last measurement: it was repeated while there were any.
  std::vector<std::string> disturbances;
};

/// Verifies each, then times all with interleaved samples, on the same buffers and in the same way.
/// Also the untuned default, where it is another recipe. Measured again, up to three times in all,
/// while something disturbs the device. `stages`: and each variant of the library's recipe by
/// itself, and the first two, three and so on in a row. Nothing if `cancel` is set before all are
/// timed.
std::optional<BenchResult> bench(const Catalog& catalog, const Op& op, const Problem& problem,
                                 const PresetLibrary& presets, Evaluator& evaluator,
                                 const TimeRequest& request, const BurstPlan& plan,
                                 const std::atomic<bool>& cancel, bool stages = false);

class Against {
 public:
  /// `path` is what `fftune bench --json` printed, or presets: a file or a folder, whose records of
  /// this device are taken, or all where it has none. Empty: there are no earlier times. Throws
  /// Error(invalid_input).
  Against(std::string path, const DeviceFacts& facts, const Catalog& catalog);

  bool knows(const Problem& problem) const { return times_.contains(compared(problem)); }

  /// The part of --json; null where there is no earlier time, or none now.
  Json add(const std::string& token_size, const BenchResult& result);
  /// Prints nothing if nothing was added.
  void print(const Output& output) const;

  bool any_slower() const { return counts_.of(Comparison::slower) > 0; }

 private:
  Problem compared(const Problem& problem) const;

  const Catalog& catalog_;
  std::string path_;
  std::map<Problem, Measured> times_;  // by compared_part() of the problem
  ComparisonCounts counts_;
  TextTable table_;
};

}  // namespace fftune::tool
