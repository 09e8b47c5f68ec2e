// Checks the plans that the library would load for a problem against the float64 reference.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "apps/fftune/check_cases.hpp"
#include "apps/fftune/status_line.hpp"
#include "device/backend.hpp"

namespace fftune::tool {

enum class CheckState { passed, failed, skipped, not_run };

struct CheckOutcome {
  CheckState state = CheckState::not_run;
  std::string recipe;    // what the library would load
  std::string rule;      // and by which rule
  double error = 0;      // the largest over the seeds
  double tolerance = 0;  // that went with it
  std::string reason;    // why it failed or was skipped, one line
  double seconds = 0;
};

/// By canonical problem.
using CheckOutcomes = std::map<Problem, CheckOutcome>;

struct CheckSettings {
  int seeds = 2;
  double budget_seconds = 0;  // no layer is begun later than this; 0: no bound
  const std::atomic<bool>* cancel = nullptr;
  StatusLine* status = nullptr;
};

/// Checks every record at each of its numbers of tokens, each problem once, layers in the order in
/// which the records have them. A device fault or the end of the budget ends it: what comes after
/// has not been run.
CheckOutcomes run_checks(const std::vector<CheckedRecord>& records, const Catalog& catalog,
                         Backend& backend, const PresetLibrary& presets,
                         const CheckSettings& settings);

}  // namespace fftune::tool
