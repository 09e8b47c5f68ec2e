// Error(invalid_input) with a formatted message.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "core/error.hpp"

namespace fftune {

template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorKind::invalid_input, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace fftune
