#include "verify/input_data.hpp"

#include <algorithm>
#include <array>
#include <span>

#include "core/hash.hpp"
#include "device/parallel.hpp"

namespace fftune {
namespace {

/// Standard deviation of the sum of four uniform integers in [0, 65535]: 2 sqrt((2^32 - 1) / 12).
constexpr double deviation = 37837.22774;

void random_values(std::uint64_t key, std::int64_t first, float scale, float mean,
                   std::span<float> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::uint64_t bits = mix(key + golden * (static_cast<std::uint64_t>(first) + i + 1));
    const auto sum = static_cast<std::int32_t>((bits & 0xffffu) + ((bits >> 16) & 0xffffu) +
                                               ((bits >> 32) & 0xffffu) + (bits >> 48));
    out[i] = mean + static_cast<float>(sum - 131070) * scale;
  }
}

}  // namespace

void random_rows(std::uint64_t seed, std::string_view name, DType dtype, double scale, double mean,
                 std::int64_t rows, std::int64_t columns, void* out, Parallel& parallel) {
  const std::uint64_t tensor_key = mix(fnv1a(name) ^ mix(seed + golden));
  const auto unit = static_cast<float>(scale / deviation);
  const std::size_t element = dtype_bytes(dtype);
  for_each_block(rows, columns, parallel, [&](const Block& block) {
    std::array<float, 1024> values;
    for (std::int64_t row = block.first_row; row < block.last_row; ++row) {
      const std::uint64_t key = mix(tensor_key + golden * (static_cast<std::uint64_t>(row) + 1));
      for (std::int64_t column = 0; column < columns; column += std::ssize(values)) {
        const auto count = std::min<std::int64_t>(std::ssize(values), columns - column);
        const std::span<float> part(values.data(), static_cast<std::size_t>(count));
        random_values(key, column, unit, static_cast<float>(mean), part);
        encode(dtype, part,
               static_cast<std::byte*>(out) +
                   static_cast<std::size_t>(row * columns + column) * element);
      }
    }
  });
}

}  // namespace fftune
