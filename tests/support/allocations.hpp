// Counts what operator new is asked for, in this program and the libraries it loads.
#pragma once

#include <cstddef>

namespace fftune::test {

/// Calls of operator new on this thread so far.
std::size_t allocations();

}  // namespace fftune::test
