// One line of status on stderr: drawn again in place on a terminal, now and then in a log.
#pragma once

#include <chrono>
#include <mutex>
#include <string>

#include "apps/fftune/output.hpp"

namespace CLI {
class App;
}  // namespace CLI

namespace fftune::tool {

enum class ProgressMode { live, plain, none };

void add_progress_option(CLI::App& command, std::string& value);

/// "auto" (or empty) is live on a terminal, else plain; quiet is none. Throws
/// Error(invalid_input).
ProgressMode progress_mode(const std::string& value, const Output& output);

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

}  // namespace fftune::tool
