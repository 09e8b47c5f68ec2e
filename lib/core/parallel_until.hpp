// Tasks divided over threads that end with the call.
#pragma once

#include <cstddef>
#include <functional>

namespace fftune {

/// Calls task(i) for each i in [0, count), begun in order of i, until one returns false or throws;
/// returns when all that were begun have ended. Runs on up to `threads` threads, the caller's among
/// them, and on fewer where the system starts no more. Rethrows the first exception.
void parallel_until(std::size_t count, std::size_t threads,
                    const std::function<bool(std::size_t)>& task);

}  // namespace fftune
