// Checks of the plans that the library would load for the ops of a saved layer, on its weights and
// on random values.
#pragma once

#include <string>
#include <vector>

#include "apps/fftune/check_cases.hpp"
#include "apps/fftune/check_run.hpp"
#include "apps/fftune/json.hpp"
#include "apps/fftune/output.hpp"
#include "apps/fftune/saved_inputs.hpp"
#include "tuning/measure/statistics.hpp"

namespace fftune::tool {

/// One problem on one kind of values.
struct SavedCheck {
  CheckOutcome outcome;
  Summary microseconds;  // nothing unless it passed
};

struct SavedChecks {
  Problem problem;
  SavedCheck random = {};
  SavedCheck saved = {};
  std::string values = {};  // where the saved ones are from
};

/// Each problem on random values and then on the saved ones; `saved` has one entry for each op. A
/// device fault ends it: later checks have not been run.
std::vector<SavedChecks> check_saved(const std::vector<Problem>& problems,
                                     const std::vector<SavedInputs>& saved, const Catalog& catalog,
                                     Backend& backend, const PresetLibrary& presets,
                                     const CheckSettings& settings);

/// Also as what the other reports of a check take: records and outcomes, on the saved values.
void print_saved(const std::vector<SavedChecks>& checks, const Output& output);
Json saved_json(const std::vector<SavedChecks>& checks);
CheckOutcomes outcomes_of(const std::vector<SavedChecks>& checks);

}  // namespace fftune::tool
