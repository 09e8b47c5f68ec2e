#include "cuda/random_data.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fftune::cuda {
namespace {

std::vector<std::byte> random_block(DType dtype, std::size_t elements) {
  std::vector<float> values(elements);
  std::uint64_t state = 0x9e3779b97f4a7c15u;
  for (float& value : values) {
    // xorshift64 (Marsaglia 2003), its upper 24 bits.
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    value = static_cast<float>(state >> 40) * 0x1p-23f - 1.0f;
  }
  std::vector<std::byte> bytes(elements * dtype_bytes(dtype));
  encode(dtype, values, bytes.data());
  return bytes;
}

}  // namespace

void fill_random(const Session& session, const Buffer& buffer, DType dtype) {
  constexpr std::size_t block_elements = std::size_t{1} << 20;
  const auto elements = std::min(block_elements, buffer.bytes() / dtype_bytes(dtype));
  if (elements == 0) return;
  const auto block = random_block(dtype, elements);
  const Driver& driver = session.driver();
  driver.check(driver.memcpy_htod_async(device_address(buffer.data()), block.data(), block.size(),
                                        session.stream()),
               "cuMemcpyHtoD");
  auto* const start = static_cast<std::byte*>(buffer.data());
  for (std::size_t done = block.size(); done < buffer.bytes();) {
    const auto bytes = std::min(done, buffer.bytes() - done);
    copy(session, start + done, start, bytes);
    done += bytes;
  }
  session.synchronize();  // the block goes away
}

}  // namespace fftune::cuda
