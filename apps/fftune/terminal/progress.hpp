// Progress on stderr: one line of status, drawn again in place on a terminal, now and then in a
// log; and on it a bar with a count and the time left.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>

#include "apps/fftune/terminal/output.hpp"

namespace fftune::tool {

enum class ProgressMode { live, plain, none };

class StatusLine {
 public:
  explicit StatusLine(ProgressMode mode) : mode_(mode) {}
  ~StatusLine();
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  /// Whether update() would print now: so that no unused text is formatted. Any thread.
  bool due();
  /// Prints if it is due (ten times a second live, every ten seconds plain), or `always`.
  void update(const std::string& text, bool always = false);
  /// The columns that a text has room in; a plain line may have any number.
  std::size_t width() const;
  /// Clears a live line, for other words to come.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;

  bool due_locked() const;

  ProgressMode mode_;
  std::mutex mutex_;
  Clock::time_point last_{};
  bool drawn_ = false;
};

/// "[####------------]" of `share`, a part of 1.
std::string bar_text(double share);

/// Steps that take as long as their weight says, relative to each other. Any thread may step. The
/// line is drawn again every second or so, so that a long step is no silence.
class ProgressBar {
 public:
  /// `what` begins the line: "check".
  ProgressBar(StatusLine& line, std::string what, std::size_t steps, double weight);

  /// One step is done; `now` ends the line: the current item.
  void step(double weight, const std::string& now);
  /// Shows the current item, with no step done.
  void show(const std::string& now, bool always = false);
  /// The same where the step takes a second or more.
  void show_if_long(const std::string& now);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

 private:
  using Clock = std::chrono::steady_clock;

  /// "check [####----] 12/40, 1m05s left: ffn/fwd bf16".
  std::string text() const;
  void draw_again(const std::stop_token& stop);

  StatusLine& line_;
  std::string what_;
  std::size_t steps_;
  double weight_;
  std::mutex mutex_;
  std::size_t done_ = 0;
  double done_weight_ = 0;
  Clock::time_point begun_ = Clock::now();
  std::string now_;
  std::condition_variable_any stopping_;
  std::jthread clock_;
};

}  // namespace fftune::tool
