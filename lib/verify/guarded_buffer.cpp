#include "verify/guarded_buffer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace fftune {
namespace {

using Guard = std::array<std::uint16_t, GuardedBuffer::guard_bytes / 2>;

/// Every 16-bit word, and every pair of them, is a NaN in each dtype: what a kernel reads out of
/// bounds and uses shows in its output. The words differ, so that copied guards show too.
const Guard& guard_pattern() {
  static const Guard pattern = [] {
    Guard words{};
    for (std::size_t i = 0; i < words.size(); ++i)
      words[i] = static_cast<std::uint16_t>(0xff81u + i % 127u);
    return words;
  }();
  return pattern;
}

}  // namespace

void GuardedBuffer::resize(std::size_t bytes) {
  if (!buffer_ || buffer_->bytes() < bytes + 2 * guard_bytes) {
    buffer_.reset();  // first, so that the old and the new need not fit together
    buffer_ = backend_->allocate(bytes + 2 * guard_bytes);
  }
  bytes_ = bytes;
  arm();
}

void GuardedBuffer::arm() {
  backend_->write(data() - guard_bytes, guard_pattern().data(), guard_bytes);
  backend_->write(data() + bytes_, guard_pattern().data(), guard_bytes);
}

std::string GuardedBuffer::damage() const {
  Guard found;
  const auto* const expected = reinterpret_cast<const std::byte*>(guard_pattern().data());
  const auto* const bytes = reinterpret_cast<const std::byte*>(found.data());
  for (const bool after : {true, false}) {
    backend_->read(found.data(), after ? data() + bytes_ : data() - guard_bytes, guard_bytes);
    if (found == guard_pattern()) continue;
    std::size_t count = 0;
    std::size_t nearest = guard_bytes;
    for (std::size_t i = 0; i < guard_bytes; ++i) {
      if (bytes[i] == expected[i]) continue;
      ++count;
      nearest = std::min(nearest, after ? i : guard_bytes - 1 - i);
    }
    return fmt::format("{} bytes of the guard {} it were written, the nearest {} bytes away", count,
                       after ? "after" : "before", nearest + 1);
  }
  return "";
}

}  // namespace fftune
