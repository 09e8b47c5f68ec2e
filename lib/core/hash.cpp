#include "core/hash.hpp"

#include <fmt/format.h>

namespace fftune {

std::string hex(std::uint64_t value) {
  return fmt::format("{:016x}", value);
}

}  // namespace fftune
