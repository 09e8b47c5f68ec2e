// The values of TensorSpec::draw in their dtype. Those of packed weights are hundreds of megabytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.hpp"
#include "device/parallel.hpp"
#include "registry/op.hpp"

namespace fftune {

/// The first `elements` of them.
inline void draw_encoded(const TensorSpec& spec, std::uint64_t seed, std::int64_t elements,
                         std::byte* out, Parallel& parallel) {
  auto values = large_vector<double>(static_cast<std::size_t>(elements), parallel);
  spec.draw(seed, values);
  for_each_block(elements, 1, parallel, [&](const Block& block) {
    const auto first = static_cast<std::size_t>(block.first_row);
    const auto count = static_cast<std::size_t>(block.last_row) - first;
    encode(spec.dtype, std::span<const double>(values).subspan(first, count),
           out + first * dtype_bytes(spec.dtype));
  });
}

}  // namespace fftune
