// Lacks of a device that may end, such as of memory for the threads of a library. Families refuse
// for them, and records do not depend on them.
#pragma once

#include <string>
#include <string_view>

#include "device/facts.hpp"

namespace fftune {

/// How a library's version ends that has no memory, or no threads, and would have them later:
/// "no OpenBLAS: its threads need 64 MiB, and this control group has 8 MiB left".
constexpr std::string_view lacks_for_threads = ": its threads ";

/// The words with which families refuse for what the device lacks for the moment; empty: nothing.
inline std::string lacking_for_now(const DeviceFacts& facts) {
  return facts.toolkit.find(lacks_for_threads) == facts.toolkit.npos ? "" : facts.toolkit;
}

}  // namespace fftune
