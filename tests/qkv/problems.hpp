// Problems of qkv for tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

#include "kernels/qkv/qkv.hpp"
#include "support/fields.hpp"
#include "support/fuzz.hpp"

namespace fftune::test {

inline Sizes qkv_sizes(std::int64_t m, std::int64_t d, std::int64_t heads, std::int64_t kv_heads,
                       std::int64_t dim) {
  return {{"m", m}, {"d", d}, {"heads", heads}, {"kv-heads", kv_heads}, {"dim", dim}};
}

Problem qkv_problem(DeviceKind kind, DType dtype, Sizes sizes, Options options = {});

/// A problem with every field drawn; heads are often such as a tile can have whole.
Problem random_qkv(DeviceKind kind, Draw& draw, std::int64_t most_elements);

}  // namespace fftune::test
