// The tuner's progress as a status line.
#pragma once

#include <set>
#include <string>
#include <utility>

#include "apps/fftune/status_line.hpp"
#include "tuning/journal/outcome.hpp"

namespace fftune::tool {

/// "m=256 (2/7) gate_up screen [####------------] 45/180, 60 compiled, 2 failed, best 12.34 µs
/// (roofline 61.0%), 24s left".
std::string progress_text(const Progress& progress, const std::string& token_size);

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

}  // namespace fftune::tool
