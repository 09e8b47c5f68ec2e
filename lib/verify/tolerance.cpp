// The tolerance of a verification; docs/precision.md derives it.
#include <algorithm>
#include <cmath>

#include "verify/verifier.hpp"

namespace fftune {
namespace {

/// Covers what the model leaves out: intermediates that round the other way because their fp32 sum
/// differs, approximations of the activation, truncating tensor-core adders.
constexpr double safety_factor = 1.4;

/// Error of PyTorch's compiled bf16 pipeline; no variant may be worse.
constexpr double bf16_cap = 3.5e-3;
/// Roundings of that pipeline: gate, up and their product.
constexpr double roundings_of_cap = 3;

/// The tensor cores' sums of fp8 products keep 13 bits below their largest addend, so that 128 of
/// them are off by up to this part of their usual size.
constexpr double fp8_sum_error = 6e-4;

}  // namespace

double tolerance(DType dtype, double rounding_error, std::int64_t reduction_length,
                 std::int64_t elements, std::int64_t stages) {
  // Rounding is to nearest, so an error e of the fp32 value before it adds at most 2e to the error
  // after it. A sum of n random terms in fp32 is off by less than sqrt(n) u of its own size; 8 u
  // more stand for the activation and the products of the epilogue. All that is relative to the
  // usual size of an element: a few of them may cancel to almost nothing together.
  const double cancellation = 1 + 64 / static_cast<double>(elements);
  const double sum_error =
      (std::ldexp(1.0, -24) * (std::sqrt(static_cast<double>(reduction_length)) + 8) +
       (dtype == DType::fp8 ? fp8_sum_error : 0)) *
      cancellation;
  // An op that quantises to fp8 rounds as part of its definition. A kernel then differs in the
  // elements that round the other way: a fraction of sum_error / spacing, each off by one spacing.
  const double flips =
      dtype == DType::fp8 ? std::sqrt(2 * sum_error * dtype_unit_roundoff(dtype)) : 0;
  const double error = rounding_error + 2 * sum_error + flips;
  const double bound = safety_factor * error;
  // The cap is exceeded only where rounding alone exceeds it: an output of a handful of elements.
  // Roundings of more stages are independent: the squares of that pipeline's add up too.
  const double cap =
      bf16_cap * std::sqrt(std::max(1.0, static_cast<double>(stages) / roundings_of_cap));
  return dtype == DType::bf16 ? std::min(bound, std::max(cap, error)) : bound;
}

}  // namespace fftune
