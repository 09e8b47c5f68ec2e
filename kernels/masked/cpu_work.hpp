// What the CPU families share: the tokens in the order of their experts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/config.hpp"
#include "device/program.hpp"
#include "kernels/masked/masked.hpp"

namespace fftune::masked {

/// The tokens of the true expert, then those of the other, each in their order.
struct Grouping {
  const std::int64_t* order;  // [m]
  std::int64_t marked;        // how many the true expert has
};

/// Sorts the tokens into `order`, room for as many.
inline Grouping group(const std::uint8_t* mask, std::int64_t tokens, std::int64_t* order) {
  std::int64_t marked = 0;
  for (std::int64_t token = 0; token < tokens; ++token) marked += mask[token] != 0;
  std::int64_t next[2] = {marked, 0};
  for (std::int64_t token = 0; token < tokens; ++token) order[next[mask[token] != 0]++] = token;
  return {order, marked};
}

/// Scratch for the order.
inline Scratch order_scratch(std::int64_t tokens) {
  return {static_cast<std::size_t>(tokens) * sizeof(std::int64_t), false};
}

}  // namespace fftune::masked
