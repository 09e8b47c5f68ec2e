// The verdict: end-to-end candidates verified and timed, the winner among them, and its record.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "measure/statistics.hpp"
#include "registry/variant.hpp"
#include "store/record.hpp"
#include "tuning/decide/end_to_end.hpp"
#include "tuning/search/group.hpp"
#include "tuning/search/session.hpp"

namespace fftune {

/// A share of a limit beyond the noise of two measurements: the limit is not the one that applied.
constexpr double most_share_of_limit = 1.05;

/// A time in a note: "28", "104.3", "23720".
std::string note_microseconds(double microseconds);

/// "the noise floor of 3.1% is above the tie band of 2.0%"; of times that differ by more than that
/// has a meaning, that they do.
std::string noise_words(double noise, double tie_band);

/// Why a time is below the limit by more than that, for people: `limit` is "memory" or "compute".
std::string beyond_limit(const Op& op, const Problem& problem, const DeviceFacts& facts,
                         const std::string& limit);

/// Whether the search measured every variant of the recipe, so that they work.
bool are_measured(const Recipe& recipe, const std::vector<Searched>& groups);

/// Whether the timed variants cover the op.
bool have_cover(const std::vector<Searched>& groups, std::size_t stage_count);

/// Verifies and times the best combinations and fills in result.record, the outcomes of
/// end-to-end candidates, baselines and notes. Without a cover that works, result.record stays
/// empty. Where times contradict
/// each other, they are measured and the winner is chosen again; it is not decided if that does
/// not help.
void conclude(Session& session, std::vector<Searched> groups, TuneResult& result);

// The part of a record for the stages of one group: the winner, its ties and the runners-up.

/// The variants that the group's winner is chosen from: the finalists that work, or else all that
/// were timed.
std::vector<std::size_t> deciders(const Searched& searched);

StageRecord stage_record(const Session& session, const Searched& searched, std::size_t variant);

// The times of a record: fresh samples of the winner and the baselines, on an undisturbed device.

/// The untuned choice's time over the winner's, both timed in turns: as contenders, or else here,
/// if it works in `groups`; none if that cannot be said.
std::optional<double> untuned_ratio(Session& session, const EndToEnd& winner,
                                    const std::vector<EndToEnd>& contenders,
                                    const std::vector<Searched>& groups);

/// Times the winner with fresh samples beside its rivals and the baselines; false if that failed.
/// The winner is also the sentinel: if its time differs from `before` (a median of 0: not known),
/// or something disturbs the device, the measurement is repeated after a wait; disturbances that
/// remain are stated in the verdict. `ratios`: the rivals' times over the winner's; infinity for
/// one that could not be timed.
bool time_winner(Session& session, const EndToEnd& winner, const std::vector<EndToEnd>& rivals,
                 Summary before, Verdict& verdict, std::vector<Ratio>& ratios, TuneResult& result);

// Times of one record that cannot all be right: the machine was busy during some of them.

/// Where a variant that is not among the finalists was timed as clearly faster than all of them,
/// the finals are measured again with it.
void repeat_contradicted_finals(Session& session, std::vector<Searched>& groups);

/// Measures the finals again, in any case.
void repeat_finals(Session& session, std::vector<Searched>& groups);

/// The contradictions in a record, one line each: a stage whose winner took longer than another
/// variant of it, and a whole that took longer than its stages together, or a fraction of that.
std::vector<std::string> contradictions(const PresetRecord& record);

/// Why the record is not decided, a clause each, by what it holds; empty where it is decided, or of
/// a version that does not say.
std::vector<std::string> doubts(const PresetRecord& record, const Catalog& catalog,
                                DeviceKind kind);

// --same-bits: a search among variants that agree bit for bit with the recorded winner, so that a
// model's results do not change.

/// Runs the recipe, end to end and every run of consecutive variants of it, and requires the same
/// hash of any winner of the same stages. Throws Error(unavailable) if it does not pass any more.
void require_bits_of(const Recipe& recipe, Session& session);

/// The recipe as a combination of what the groups hold; none if they do not hold all of it.
std::optional<Combination> combination_of(const Recipe& recipe,
                                          const std::vector<Searched>& groups);

}  // namespace fftune
