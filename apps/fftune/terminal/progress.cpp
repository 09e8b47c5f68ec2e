#include "apps/fftune/terminal/progress.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <system_error>
#include <utility>

#include "apps/fftune/terminal/text.hpp"

namespace fftune::tool {

namespace {

void print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

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
  print(std::string(clear_line) + truncated(line, width()));
}

std::size_t StatusLine::width() const {
  return mode_ == ProgressMode::live ? terminal_width(stderr) - 1 : std::string::npos;
}

void StatusLine::clear() {
  const std::lock_guard lock(mutex_);
  if (drawn_) print(std::string(clear_line));
  drawn_ = false;
}

std::string bar_text(double share) {
  constexpr std::size_t width = 16;
  const double part = std::isfinite(share) ? std::clamp(share, 0.0, 1.0) : 0;
  const auto full = static_cast<std::size_t>(part * width);
  return "[" + std::string(full, '#') + std::string(width - full, '-') + "]";
}

ProgressBar::ProgressBar(StatusLine& line, std::string what, std::size_t steps, double weight)
    : line_(line), what_(std::move(what)), steps_(steps), weight_(weight) {
  try {
    clock_ = std::jthread([this](const std::stop_token& stop) { draw_again(stop); });
  } catch (const std::system_error&) {
    // Where no thread can be started, the steps alone draw it.
  }
}

ProgressBar::~ProgressBar() {
  clock_.request_stop();
}

void ProgressBar::draw_again(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  // Before the first show() there is nothing to say.
  while (!stopping_.wait_for(lock, stop, std::chrono::seconds(1), [] { return false; }) &&
         !stop.stop_requested())
    if (!now_.empty() && line_.due()) line_.update(text());
}

std::string ProgressBar::text() const {
  const double share = weight_ > 0 ? std::min(done_weight_ / weight_, 1.0) : 0;
  const double spent = std::chrono::duration<double>(Clock::now() - begun_).count();
  std::string text = fmt::format("{} {} {}/{}", what_, bar_text(share), done_, steps_);
  if (share > 0)
    text += fmt::format(", {} left", seconds_text(spent * (1 - share) / share));
  else if (spent >= 1)
    text += fmt::format(", {} so far", seconds_text(spent));
  return now_.empty() ? text : text + ": " + now_;
}

void ProgressBar::step(double weight, const std::string& now) {
  const std::lock_guard lock(mutex_);
  ++done_;
  done_weight_ += weight;
  now_ = now;
  if (line_.due()) line_.update(text());
}

void ProgressBar::show(const std::string& now, bool always) {
  const std::lock_guard lock(mutex_);
  now_ = now;
  if (always || line_.due()) line_.update(text(), always);
}

void ProgressBar::show_if_long(const std::string& now) {
  const std::lock_guard lock(mutex_);
  now_ = now;
}

}  // namespace fftune::tool
