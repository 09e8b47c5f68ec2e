// Problems of causal-conv1d for tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "kernels/causal_conv1d/causal_conv1d.hpp"
#include "support/fuzz.hpp"

namespace fftune::test {

inline Problem conv_problem(DeviceKind kind, const std::string& pass, DType dtype,
                            std::map<std::string, std::int64_t> sizes,
                            std::map<std::string, std::string> options = {}) {
  return canonical(causal_conv1d_op(),
                   {"causal-conv1d", pass, dtype, std::move(sizes), std::move(options)}, kind);
}

/// A problem with every field drawn.
Problem random_conv(DeviceKind kind, Draw& draw, std::int64_t most_elements);

}  // namespace fftune::test
