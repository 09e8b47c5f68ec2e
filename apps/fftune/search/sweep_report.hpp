// A sweep for people: the tuner's progress as a status line, and its result as a table and as JSON.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "apps/fftune/terminal/json.hpp"
#include "apps/fftune/terminal/output.hpp"
#include "apps/fftune/terminal/progress.hpp"
#include "tuning/journal/outcome.hpp"
#include "tuning/tuner.hpp"

namespace fftune::tool {

/// "m=256 (2/7) gate_up screen [####------------] 45/180, 60 compiled, 2 failed, best 12.34 µs
/// (roofline 61.0%), 24s left". A line has at most `width` columns: the least important is left
/// out.
std::string progress_text(const Progress& progress, const std::string& token_size,
                          std::size_t width);

class SweepProgress : public ProgressSink {
 public:
  SweepProgress(StatusLine& line, std::string token_size)
      : line_(line), token_size_(std::move(token_size)) {}

  /// The first of each phase of each problem is always told; what lies between when the line is
  /// due. A search goes to and fro between compiling and screening.
  void update(const Progress& progress) override;

 private:
  StatusLine& line_;
  std::string token_size_;
  std::set<std::string> told_;  // problem, group and phase
};

/// m, the winner of each stage, median, fraction of the roofline and its limit, times faster than
/// the unfused pipeline, ties and how many ran; then what a person should know of each problem.
void print_sweep(const std::vector<TuneResult>& results, const std::string& token_size,
                 const Output& output);

Json sweep_json(const std::vector<TuneResult>& results);

/// The notes of all problems, a line for all that say the same: "m=1,16: undecided: the noise floor
/// of 3.1 to 9.3% is above the tie band of 2.0%".
std::vector<std::string> note_lines(const std::vector<TuneResult>& results,
                                    const std::string& token_size, bool verbose);

/// One line that says what to do about the problems that are undecided because the machine was
/// busy; empty if there are none.
std::string busy_advice(const std::vector<TuneResult>& results, const std::string& token_size);

/// Whether nothing was tried: the problem does not fit, or no family serves it.
bool was_refused(const TuneResult& result);

}  // namespace fftune::tool
