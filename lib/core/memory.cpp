#include "core/memory.hpp"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <cstddef>

#include "core/error.hpp"

namespace fftune {

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

std::string misfit(const std::string& what, double needed, double there, const std::string& where) {
  if (needed <= there) return "";
  return fmt::format("{} needs {} of memory on {}, and {} are there: use smaller sizes", what,
                     bytes_text(needed), where, bytes_text(there));
}

void require_fit(const std::string& what, double needed, double there, const std::string& where) {
  if (const auto lacking = misfit(what, needed, there, where); !lacking.empty())
    throw Error(ErrorKind::unavailable, lacking);
}

}  // namespace fftune
