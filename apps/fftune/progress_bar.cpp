#include "apps/fftune/progress_bar.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
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
    : line_(line), what_(std::move(what)), steps_(steps), weight_(weight) {}

std::string ProgressBar::text(const std::string& now) const {
  const double share = weight_ > 0 ? std::min(done_weight_ / weight_, 1.0) : 0;
  const double spent = std::chrono::duration<double>(Clock::now() - begun_).count();
  std::string text = fmt::format("{} {} {}/{}", what_, bar_text(share), done_, steps_);
  if (share > 0) text += fmt::format(", {} left", seconds_text(spent * (1 - share) / share));
  return now.empty() ? text : text + ": " + now;
}

void ProgressBar::step(double weight, const std::string& now) {
  const std::lock_guard lock(mutex_);
  ++done_;
  done_weight_ += weight;
  if (line_.due()) line_.update(text(now));
}

void ProgressBar::show(const std::string& now, bool always) {
  const std::lock_guard lock(mutex_);
  if (always || line_.due()) line_.update(text(now), always);
}

}  // namespace fftune::tool
