// Which tensors of a problem share memory, and which have none.
#pragma once

#include <cstddef>
#include <vector>

namespace fftune {

/// For each tensor of a problem the place of the one whose memory it has: mostly its own, or
/// `nowhere` (device/backend.hpp). Empty: each has its own.
using Holders = std::vector<std::size_t>;

}  // namespace fftune
