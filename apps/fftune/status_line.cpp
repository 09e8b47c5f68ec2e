#include "apps/fftune/status_line.hpp"

#include <CLI/CLI.hpp>
#include <cstdio>

#include "apps/fftune/terminal.hpp"
#include "apps/fftune/values.hpp"

namespace fftune::tool {

namespace {

void print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

void add_progress_option(CLI::App& command, std::string& value) {
  command
      .add_option("--progress", value,
                  "auto, live, plain or none (default: auto, which is live on a terminal and plain "
                  "in a log)")
      ->type_name("WORD");
}

ProgressMode progress_mode(const std::string& value, const Output& output) {
  const std::string word = value.empty() ? "auto" : value;
  check_choice(word, "--progress", {"auto", "live", "plain", "none"});
  if (output.quiet() || word == "none") return ProgressMode::none;
  if (word == "live" || (word == "auto" && output.live())) return ProgressMode::live;
  return ProgressMode::plain;
}

StatusLine::~StatusLine() {
  clear();
}

bool StatusLine::due_locked() const {
  using std::chrono::milliseconds;
  if (mode_ == ProgressMode::none) return false;
  const auto period = mode_ == ProgressMode::live ? milliseconds(100) : milliseconds(10'000);
  return Clock::now() - last_ >= period;
}

bool StatusLine::due() {
  const std::lock_guard lock(mutex_);
  return due_locked();
}

void StatusLine::update(const std::string& text, bool always) {
  const std::lock_guard lock(mutex_);
  if (mode_ == ProgressMode::none || !(always || due_locked())) return;
  last_ = Clock::now();
  // Names of files are in it.
  const std::string line = shown(text);
  if (mode_ == ProgressMode::plain) return print(line + "\n");
  drawn_ = true;
  print(std::string(clear_line) + truncated(line, terminal_width(stderr) - 1));
}

void StatusLine::clear() {
  const std::lock_guard lock(mutex_);
  if (drawn_) print(std::string(clear_line));
  drawn_ = false;
}

}  // namespace fftune::tool
