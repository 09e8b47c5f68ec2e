#include "tuning/log.hpp"

#include <spdlog/spdlog.h>

namespace fftune::logging {
namespace {

spdlog::level::level_enum level_of(Level level) {
  switch (level) {
    case Level::debug:
      return spdlog::level::debug;
    case Level::info:
      return spdlog::level::info;
    case Level::warn:
      return spdlog::level::warn;
    case Level::error:
      break;
  }
  return spdlog::level::err;
}

}  // namespace

bool shows(Level level) {
  return spdlog::should_log(level_of(level));
}

void write(Level level, const std::string& message) {
  spdlog::log(level_of(level), spdlog::string_view_t(message));
}

}  // namespace fftune::logging
