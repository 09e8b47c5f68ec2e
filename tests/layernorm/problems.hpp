// Problems of layernorm for tests.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "kernels/norm/norm.hpp"
#include "support/fuzz.hpp"

namespace fftune::test {

inline Problem layernorm_problem(DeviceKind kind, const std::string& pass, DType dtype,
                                 std::int64_t m, std::int64_t d,
                                 std::map<std::string, std::string> options = {}) {
  return canonical(layernorm_op(),
                   {"layernorm", pass, dtype, {{"m", m}, {"d", d}}, std::move(options)}, kind);
}

/// A problem with every field drawn.
inline Problem random_layernorm(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const auto [m, d] = draw.matrix(most_elements, norm::most_features);
  return layernorm_problem(
      kind, draw.of({"fwd", "bwd"}), draw.of(layernorm_op().dtypes(kind)), m, d,
      {{"residual", draw.of({"no", "yes"})}, {"eps", draw.of({"1e-6", "1e-5", "0.1"})}});
}

}  // namespace fftune::test
