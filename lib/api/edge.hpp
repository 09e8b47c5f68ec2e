// The edge of the C API: exceptions become status codes and one line for this thread; structs that
// later versions may extend begin with their size.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <exception>
#include <filesystem>
#include <new>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/error.hpp"
#include "fftune/fftune.h"

namespace fftune {

/// The line of fftune_last_error(): fixed memory, so that reporting a failure allocates nothing.
inline std::array<char, 2048>& last_failure() {
  thread_local std::array<char, 2048> line{};
  return line;
}

/// Writes the line and returns `status`. Control characters in the values, such as a newline or an
/// escape in a path, become '?': the line is shown on terminals and is one line.
template <typename... Values>
fftune_status fail(fftune_status status, fmt::format_string<Values...> format, Values&&... values) {
  auto& line = last_failure();
  const auto written =
      fmt::format_to_n(line.data(), line.size() - 1, format, std::forward<Values>(values)...);
  char* end = written.out;
  if (written.size > line.size() - 1) {
    // A cut line ends with a whole character of UTF-8; its later bytes begin with the bits 10.
    constexpr std::string_view cut = "...";
    end -= cut.size();
    while (end != line.data() && (static_cast<unsigned char>(*end) & 0xc0) == 0x80) --end;
    end = std::copy(cut.begin(), cut.end(), end);
  }
  *end = '\0';
  for (char* c = line.data(); c != end; ++c)
    if (static_cast<unsigned char>(*c) < 0x20 || *c == 0x7f) *c = '?';
  return status;
}

inline fftune_status status_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::invalid_input:
      return FFTUNE_INVALID_INPUT;
    case ErrorKind::unavailable:
      return FFTUNE_UNAVAILABLE;
    case ErrorKind::device_fault:
      return FFTUNE_DEVICE_FAULT;
    case ErrorKind::io:
      return FFTUNE_IO_ERROR;
    case ErrorKind::internal:
      return FFTUNE_INTERNAL_ERROR;
  }
  return FFTUNE_INTERNAL_ERROR;
}

/// Runs `body`; no exception leaves it. `function` begins the line.
template <typename Body>
fftune_status guarded(const char* function, const Body& body) noexcept {
  try {
    return body();
  } catch (const Error& error) {
    return fail(status_of(error.kind()), "{}: {}", function, error.what());
  } catch (const std::bad_alloc&) {
    return fail(FFTUNE_UNAVAILABLE, "{}: out of host memory", function);
  } catch (const std::filesystem::filesystem_error& error) {
    // A path may be longer than what is kept of a message.
    return fail(FFTUNE_IO_ERROR, "{}: {}: '{}'", function, error.code().message(),
                error.path1().string());
  } catch (const std::system_error& error) {
    const bool limit = error.code() == std::errc::resource_unavailable_try_again;
    return fail(FFTUNE_UNAVAILABLE, "{}: {}{}", function, error.what(),
                limit ? ": no more threads can be started: raise the limit (ulimit -u)" : "");
  } catch (const std::exception& error) {
    return fail(FFTUNE_INTERNAL_ERROR, "{}: {}", function, error.what());
  } catch (...) {
    return fail(FFTUNE_INTERNAL_ERROR, "{}: an unknown exception", function);
  }
}

/// The struct as this version has it: zeros where the caller's is shorter, which is of an older
/// header. Throws Error(invalid_input) for one that is longer and not zero there, or has no size.
template <typename Struct>
Struct read_struct(const Struct& given, const char* name, std::size_t least_bytes) {
  std::size_t bytes = 0;
  std::memcpy(&bytes, &given, sizeof bytes);
  if (bytes < least_bytes || bytes > std::size_t{4096})
    throw Error(ErrorKind::invalid_input,
                fmt::format("{0}.struct_size is {1}: set it to sizeof({0})", name, bytes));
  const auto* const begin = reinterpret_cast<const unsigned char*>(&given);
  if (bytes > sizeof(Struct) && std::any_of(begin + sizeof(Struct), begin + bytes,
                                            [](unsigned char byte) { return byte != 0; }))
    throw Error(ErrorKind::invalid_input,
                fmt::format("{} has fields that this version of fftune, {}, does not know: update "
                            "the library",
                            name, FFTUNE_VERSION));
  Struct own{};
  std::memcpy(&own, &given, std::min(bytes, sizeof own));
  return own;
}

}  // namespace fftune
