// Which tensors of a problem share memory, and which have none.
#pragma once

#include <cstddef>
#include <vector>

namespace fftune {

/// For each tensor of a problem the place of the one whose memory it has: mostly its own, or
/// `nowhere`. Empty: each has its own.
using Holders = std::vector<std::size_t>;
constexpr std::size_t nowhere = static_cast<std::size_t>(-1);

}  // namespace fftune
