// The time now, in UTC: for people and records "2026-11-21T14:03:22Z".
#pragma once

#include <ctime>
#include <string>

namespace fftune {

/// In a format of strftime whose result has at most 31 characters.
inline std::string utc_now(const char* format = "%Y-%m-%dT%H:%M:%SZ") {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  return {text, std::strftime(text, sizeof text, format, &utc)};
}

}  // namespace fftune
