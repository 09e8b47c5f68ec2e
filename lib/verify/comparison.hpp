// Comparing an output on the host with its float64 reference, whose rows repeat.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "device/program.hpp"

namespace fftune {

/// A row-major matrix whose rows repeat: row i is row i mod period.
struct RepeatedRows {
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t period = 0;  // distinct rows; `rows` where nothing repeats
  const std::int64_t* source =
      nullptr;             // the distinct row of each row, where it is not i mod period
  std::int64_t alike = 0;  // TensorSpec::alike
  double least_bound = 0;  // of an element, where neighbours are alike
  /// By which the absolute bound is multiplied in each distinct row; null: 1.
  const double* factors = nullptr;
  /// Distinct rows of Expected::rounded; null: an element's bound is that of the others.
  const std::vector<const double*>* rounded = nullptr;
  /// Distinct rows of Expected::independent; null: NaN everywhere.
  const std::vector<const double*>* independent = nullptr;
};

struct Difference {
  double norm = 0;                   // of out - ref; infinite if any element is not finite
  double of_independent = 0;         // the norm of the numbers of `independent` that are compared
  std::int64_t unwritten = 0;        // elements whose bytes are all 0xff, the poison
  std::int64_t first_unwritten = 0;  // row-major index
  std::int64_t outliers = 0;         // elements beyond their own bound, not-a-number among them
  std::int64_t first_outlier = 0;
  double outlier_value = 0;  // the first one's, and what it should be
  double outlier_reference = 0;
};

/// `out` holds rows x columns elements; `reference` the distinct rows. An element is an outlier if
/// its error is not at most relative_bound |ref| + absolute_bound; where neighbours are `alike`,
/// absolute_bound is relative to the root of their mean square, and least_bound is added to it.
/// Where the reference is `rounded`, the difference that this makes is added, element by element.
/// An infinity is equal to the same infinity alone. NaN where the reference is NaN has no error; a
/// number there is compared with `independent`.
Difference compare(const RepeatedRows& shape, const void* out,
                   const std::vector<const double*>& reference, double relative_bound,
                   double absolute_bound, Parallel& parallel);

/// The index of the first byte that differs, or `bytes`.
std::size_t first_difference(const std::byte* a, const std::byte* b, std::size_t bytes,
                             Parallel& parallel);

/// "[12, 7]" of a row-major index.
std::string coordinates(std::int64_t index, std::int64_t columns);

// A hash of a run's results, which identifies runs that agree in every bit.

/// The same for the same bytes on every machine, however many threads there are.
std::uint64_t hash_of_bits(const std::byte* data, std::size_t bytes, Parallel& parallel);

}  // namespace fftune
