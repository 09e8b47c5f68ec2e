// The worked numbers of docs/precision.md.
#include <cmath>
#include <cstdint>

#include "support/catch.hpp"
#include "verify/verifier.hpp"

using namespace fftune;

namespace {

constexpr std::int64_t many = std::int64_t{1} << 50;

bool close(double a, double b) {
  return std::abs(a - b) < 1e-9 * std::abs(b);
}

}  // namespace

TEST_CASE("the tolerance is 1.4 times rounding and twice the sum's error") {
  const double u = std::ldexp(1.0, -24);
  CHECK(close(tolerance(DType::f32, 1e-7, 1024, many), 1.4 * (1e-7 + 2 * u * (32 + 8))));
  CHECK(close(tolerance(DType::fp16, 2e-4, 4096, many), 1.4 * (2e-4 + 2 * u * (64 + 8))));
  const double fp8_sum = u * (64 + 8) + 6e-4;
  CHECK(close(tolerance(DType::fp8, 2e-2, 4096, many),
              1.4 * (2e-2 + 2 * fp8_sum + std::sqrt(2 * fp8_sum / 16))));
  CHECK(close(tolerance(DType::bf16, 2.3e-3, 3072, many),
              1.4 * (2.3e-3 + 2 * u * (std::sqrt(3072.0) + 8))));
}

TEST_CASE("bf16 is capped at 3.5e-3, unless rounding alone is worse") {
  CHECK(tolerance(DType::bf16, 2.4e-3, 18432, many) <= 3.5e-3);
  CHECK(tolerance(DType::bf16, 3.4e-3, 3072, many) == 3.5e-3);
  CHECK(tolerance(DType::bf16, 7.8e-3, 1, many) > 7.8e-3);
  CHECK(tolerance(DType::bf16, 7.8e-3, 1, many) < 7.81e-3);
}

TEST_CASE("a longer sum and a larger rounding error never lower the tolerance") {
  for (const auto dtype : {DType::f32, DType::bf16, DType::fp16}) {
    double last = 0;
    for (std::int64_t n = 1; n < (std::int64_t{1} << 40); n *= 3) {
      const double now = tolerance(dtype, 1e-3, n, many);
      CHECK(now >= last);
      last = now;
    }
    CHECK(tolerance(dtype, 0, 1, many) > 0);
    CHECK(tolerance(dtype, 2e-3, 64, many) >= tolerance(dtype, 1e-3, 64, many));
  }
}

TEST_CASE("a few elements may cancel: the fewer, the more the sums count") {
  const double u = std::ldexp(1.0, -24);
  CHECK(close(tolerance(DType::f32, 0, 1, 1), 1.4 * 2 * u * 9 * 65));
  CHECK(close(tolerance(DType::f32, 0, 1, 64), 1.4 * 2 * u * 9 * 2));
}
