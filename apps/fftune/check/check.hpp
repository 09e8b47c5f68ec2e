// fftune check: the cases, their runs, and the report.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "apps/fftune/saved/weight_options.hpp"
#include "apps/fftune/terminal/json.hpp"
#include "apps/fftune/terminal/output.hpp"
#include "apps/fftune/terminal/progress.hpp"
#include "device/backend.hpp"
#include "measure/statistics.hpp"
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

/// The memory that is free for checks.
struct FreeMemory {
  std::size_t device = 0, host = 0;
};

/// Skips problems whose tensors exceed the device's free bytes, or whose data exceed the host's. An
/// intermediate that no program of the chosen recipe has counts for nothing.
void skip_too_large(const Catalog& catalog, const DeviceFacts& facts, const PresetLibrary& presets,
                    const FreeMemory& free, std::vector<CheckedRecord>& records);

/// Rough time of making the data, the reference and the runs of one problem with one seed: good for
/// sharing out a progress bar and for telling a minute from an hour.
double estimated_seconds(const Op& op, const Problem& problem, DeviceKind kind);

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

std::string state_name(CheckState state);
Style state_style(CheckState state);

struct CheckCounts {
  std::size_t passed = 0;
  std::size_t failed = 0;
  std::size_t skipped = 0;
  std::size_t not_run = 0;
};

/// A record fails with any of its problems, and passes if all pass.
CheckCounts print_checks(const std::vector<CheckedRecord>& records, const CheckOutcomes& outcomes,
                         const Catalog& catalog, const Output& output);

Json checks_json(const std::vector<CheckedRecord>& records, const CheckOutcomes& outcomes);

/// As JUnit's XML, one test case for each problem and one for each skipped record.
std::string junit_text(const std::string& device, const std::vector<CheckedRecord>& records,
                       const CheckOutcomes& outcomes);

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
