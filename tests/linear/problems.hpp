// Problems of linear for tests.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "kernels/linear/linear.hpp"
#include "support/error_of.hpp"
#include "support/fields.hpp"

namespace fftune::test {

struct LinearSizes {
  std::int64_t m, k, n;
};

/// As a caller writes it: not canonical.
inline Problem linear_problem(const std::string& pass, const LinearSizes& sizes, DType dtype,
                              Options options = {}) {
  return {
      "linear", pass, dtype, {{"m", sizes.m}, {"k", sizes.k}, {"n", sizes.n}}, std::move(options)};
}

/// Why a GPU has no forward pass of bf16 with these, or "".
inline std::string linear_complaint(const LinearSizes& sizes, Options options) {
  return error_of([&] {
    canonical(linear_op(), linear_problem("fwd", sizes, DType::bf16, std::move(options)),
              DeviceKind::cuda);
  });
}

}  // namespace fftune::test
