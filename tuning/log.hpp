// Log messages of the tool. spdlog, which takes seconds to compile, stays behind log.cpp.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

namespace fftune::logging {

enum class Level { debug, info, warn, error };

/// Whether messages of that level are shown.
bool shows(Level level);
void write(Level level, const std::string& message);

template <typename... Arguments>
void debug(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  if (shows(Level::debug))
    write(Level::debug, fmt::format(format, std::forward<Arguments>(arguments)...));
}

template <typename... Arguments>
void info(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  write(Level::info, fmt::format(format, std::forward<Arguments>(arguments)...));
}

template <typename... Arguments>
void warn(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  write(Level::warn, fmt::format(format, std::forward<Arguments>(arguments)...));
}

template <typename... Arguments>
void error(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  write(Level::error, fmt::format(format, std::forward<Arguments>(arguments)...));
}

}  // namespace fftune::logging
