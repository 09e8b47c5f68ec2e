#include "apps/fftune/numbers.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "tuning/decide/verdict.hpp"

namespace fftune::tool {

std::string counted(std::size_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string bytes_text(double bytes) {
  constexpr std::array units{"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < units.size()) {
    bytes /= 1024;
    ++unit;
  }
  return bytes == std::floor(bytes) ? fmt::format("{:.0f} {}", bytes, units[unit])
                                    : fmt::format("{:.1f} {}", bytes, units[unit]);
}

std::string microseconds_text(double microseconds) {
  if (!std::isfinite(microseconds) || microseconds <= 0) return "-";
  const int digits_before = static_cast<int>(std::floor(std::log10(microseconds))) + 1;
  return fmt::format("{:.{}f}", microseconds, std::clamp(4 - digits_before, 0, 3));
}

std::string percent_text(double fraction) {
  return fmt::format("{:.1f}%", 100 * fraction);
}

std::string limit_share_text(double fraction) {
  return fraction > most_share_of_limit ? "above the limit" : percent_text(fraction);
}

std::string ratio_text(double ratio) {
  // Decided by the printed digits: 0.998 reads as 1.00.
  return fmt::format("{}{:.2f}x", ratio < 0.995 ? "▼" : "", ratio);
}

std::string ratio_range_text(double low, double high) {
  return fmt::format("{}{:.2f}-{:.2f}x", high < 0.995 ? "▼" : "", low, high);
}

std::string error_text(double error) {
  return fmt::format("{:.1e}", error);
}

std::string seconds_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::llround(std::max(0.0, seconds)));
  if (whole < 60) return fmt::format("{}s", whole);
  if (whole < 3600) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  return fmt::format("{}h{:02}m", whole / 3600, whole / 60 % 60);
}

}  // namespace fftune::tool
