#include "apps/fftune/progress_bar.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <system_error>
#include <utility>

#include "apps/fftune/numbers.hpp"

namespace fftune::tool {

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

}  // namespace fftune::tool
