#include "apps/fftune/sweep_progress.hpp"

#include <fmt/format.h>

#include "apps/fftune/numbers.hpp"
#include "apps/fftune/progress_bar.hpp"

namespace fftune::tool {

std::string progress_text(const Progress& progress, const std::string& token_size) {
  std::string text = fmt::format("{}={} {} ({}/{})", token_size, progress.problem.size(token_size),
                                 dtype_name(progress.problem.dtype), progress.problem_index + 1,
                                 progress.problem_count);
  if (!progress.group.empty()) text += " " + progress.group;
  text += fmt::format(" {}", phase_name(progress.phase));
  if (progress.total > 0)
    text += fmt::format(" {} {}/{}", bar_text(static_cast<double>(progress.done) / progress.total),
                        progress.done, progress.total);
  text += fmt::format(", {} compiled, {} failed", progress.compiled, progress.failed);
  if (progress.best_us > 0)
    text += fmt::format(", best {} µs", microseconds_text(progress.best_us));
  if (progress.best_us > 0 && progress.roofline > 0)
    text += fmt::format(" (roofline {})", limit_share_text(progress.roofline));
  if (progress.gain_left >= 0)
    text += fmt::format(", at most {} to gain", percent_text(progress.gain_left));
  if (progress.seconds_left > 0)
    text += fmt::format(", {} left", seconds_text(progress.seconds_left));
  return text;
}

void SweepProgress::update(const Progress& progress) {
  const std::string step =
      fmt::format("{}/{}/{}", progress.problem_index, progress.group, phase_name(progress.phase));
  const bool new_step = told_.insert(step).second;
  if (!new_step && !line_.due()) return;
  line_.update(progress_text(progress, token_size_), new_step);
}

}  // namespace fftune::tool
