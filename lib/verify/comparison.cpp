#include "verify/comparison.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "core/hash.hpp"
#include "device/parallel.hpp"

namespace fftune {
namespace {

constexpr std::int64_t none = std::numeric_limits<std::int64_t>::max();

/// Sums of one block of rows; they are added up in order, so that the total does not depend on the
/// threads.
struct Partial {
  double squares = 0;
  double of_independent = 0;
  std::int64_t unwritten = 0;
  std::int64_t first_unwritten = none;
  std::int64_t outliers = 0;
  std::int64_t first_outlier = none;
  double outlier_value = 0;
  double outlier_reference = 0;
};

template <typename Word>
std::int64_t count_poison(const std::byte* data, std::size_t count, std::int64_t& first) {
  std::int64_t poisoned = 0;
  first = none;
  for (std::size_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, data + i * sizeof word, sizeof word);
    if (word != std::numeric_limits<Word>::max()) continue;
    if (poisoned++ == 0) first = static_cast<std::int64_t>(i);
  }
  return poisoned;
}

/// Elements of a row that are compared at a time.
constexpr std::int64_t most_together = 1024;

/// Up to most_together elements of one row, `index` being the first one's place in the matrix.
void compare_part(DType dtype, std::int64_t index, const std::byte* out,
                  std::span<const double> reference, const double* independent,
                  const double* rounded, double relative_bound, double absolute_bound,
                  Partial& partial) {
  std::array<float, most_together> values;
  const std::size_t count = reference.size();
  decode(dtype, out, {values.data(), count});

  static constexpr std::array<double, most_together> zeros{};
  std::array<double, most_together> differences;
  if (rounded != nullptr)
    for (std::size_t i = 0; i < count; ++i) {
      const double difference = std::abs(rounded[i] - reference[i]);
      differences[i] = std::isfinite(difference) ? difference : 0;
    }
  const double* const of_rounding = rounded != nullptr ? differences.data() : zeros.data();
  const auto bound_of = [=](double value, double more) {
    return std::isinf(value) ? 0 : relative_bound * std::abs(value) + absolute_bound + more;
  };
  std::array<double, most_together> expected;
  if (std::any_of(reference.begin(), reference.end(), [](double x) { return std::isnan(x); })) {
    std::copy(reference.begin(), reference.end(), expected.begin());
    for (std::size_t i = 0; i < count; ++i) {
      if (!std::isnan(expected[i])) continue;
      if (std::isnan(values[i]))
        values[i] = 0, expected[i] = 0;  // as it should be
      else if (independent != nullptr) {
        expected[i] = independent[i];
        if (std::isfinite(expected[i])) partial.of_independent += expected[i] * expected[i];
      }
    }
    reference = {expected.data(), count};
  }
  std::array<double, 4> squares{};  // four chains hide the latency of an addition
  std::array<int, 4> outliers{};
  for (std::size_t i = 0; i < count; ++i) {
    // An infinity that the op defines equals its reference.
    const double error = values[i] == reference[i] ? 0 : std::abs(values[i] - reference[i]);
    squares[i & 3] += error * error;
    // Negated so that NaN counts.
    outliers[i & 3] += !(error <= bound_of(reference[i], of_rounding[i]));
  }
  partial.squares += (squares[0] + squares[1]) + (squares[2] + squares[3]);
  const int found = outliers[0] + outliers[1] + outliers[2] + outliers[3];
  if (found == 0) return;

  if (partial.outliers == 0) {
    for (std::size_t i = 0; i < count; ++i) {
      const double error = values[i] == reference[i] ? 0 : std::abs(values[i] - reference[i]);
      if (error <= bound_of(reference[i], of_rounding[i])) continue;
      partial.first_outlier = index + static_cast<std::int64_t>(i);
      partial.outlier_value = values[i];
      partial.outlier_reference = reference[i];
      break;
    }
  }
  partial.outliers += found;
  // Poison is a NaN and so an outlier: without outliers there is none.
  std::int64_t first = none;
  const std::size_t bytes = dtype_bytes(dtype);
  const std::int64_t unwritten = bytes == 8   ? count_poison<std::uint64_t>(out, count, first)
                                 : bytes == 4 ? count_poison<std::uint32_t>(out, count, first)
                                 : bytes == 2 ? count_poison<std::uint16_t>(out, count, first)
                                              : count_poison<std::uint8_t>(out, count, first);
  if (unwritten > 0 && partial.unwritten == 0) partial.first_unwritten = index + first;
  partial.unwritten += unwritten;
}

/// The root of the mean square of the finite values.
double size_of(std::span<const double> values) {
  double squares = 0, count = 0;
  for (const double value : values)
    if (std::isfinite(value)) squares += value * value, ++count;
  return std::sqrt(squares / std::max(1.0, count));
}

}  // namespace

Difference compare(const RepeatedRows& shape, const void* out,
                   const std::vector<const double*>& reference, double relative_bound,
                   double absolute_bound, Parallel& parallel) {
  const std::size_t element = dtype_bytes(shape.dtype);
  const std::int64_t alike = shape.alike > 0 ? shape.alike : shape.columns;
  std::vector<Partial> partials(static_cast<std::size_t>(block_count(shape.rows, shape.columns)));
  for_each_block(shape.rows, shape.columns, parallel, [&](const Block& block) {
    Partial partial;
    for (std::int64_t row = block.first_row; row < block.last_row; ++row) {
      const std::int64_t source = shape.source != nullptr ? shape.source[row] : row % shape.period;
      const double* const expected = reference[static_cast<std::size_t>(source)];
      const double* const independent =
          shape.independent == nullptr ? nullptr
                                       : (*shape.independent)[static_cast<std::size_t>(source)];
      const double* const rounded =
          shape.rounded == nullptr ? nullptr : (*shape.rounded)[static_cast<std::size_t>(source)];
      for (std::int64_t first = 0; first < shape.columns; first += alike) {
        const std::int64_t last = std::min(first + alike, shape.columns);
        const double own =
            shape.alike > 0 ? size_of({expected + first, static_cast<std::size_t>(last - first)}) *
                                      absolute_bound +
                                  shape.least_bound
                            : absolute_bound;
        const double bound = own * (shape.factors != nullptr ? shape.factors[source] : 1);
        for (std::int64_t column = first; column < last; column += most_together) {
          const auto count = static_cast<std::size_t>(std::min(most_together, last - column));
          const std::int64_t index = row * shape.columns + column;
          compare_part(
              shape.dtype, index,
              static_cast<const std::byte*>(out) + static_cast<std::size_t>(index) * element,
              {expected + column, count}, independent == nullptr ? nullptr : independent + column,
              rounded == nullptr ? nullptr : rounded + column, relative_bound, bound, partial);
        }
      }
    }
    partials[static_cast<std::size_t>(block.index)] = partial;
  });

  Difference difference;
  double squares = 0, of_independent = 0;
  for (const auto& partial : partials) {
    squares += partial.squares;
    of_independent += partial.of_independent;
    if (partial.unwritten > 0 && difference.unwritten == 0)
      difference.first_unwritten = partial.first_unwritten;
    difference.unwritten += partial.unwritten;
    if (partial.outliers > 0 && difference.outliers == 0) {
      difference.first_outlier = partial.first_outlier;
      difference.outlier_value = partial.outlier_value;
      difference.outlier_reference = partial.outlier_reference;
    }
    difference.outliers += partial.outliers;
  }

  difference.norm = std::isfinite(squares) ? std::sqrt(squares) : HUGE_VAL;
  difference.of_independent = std::sqrt(of_independent);
  return difference;
}

std::size_t first_difference(const std::byte* a, const std::byte* b, std::size_t bytes,
                             Parallel& parallel) {
  constexpr std::size_t piece = std::size_t{1} << 18;
  const std::size_t pieces = (bytes + piece - 1) / piece;
  std::vector<std::uint8_t> differs(pieces, 0);
  parallel.run(static_cast<int>(pieces), parallel.max_threads(), [&](int index) {
    const std::size_t begin = static_cast<std::size_t>(index) * piece;
    const std::size_t size = std::min(piece, bytes - begin);
    differs[static_cast<std::size_t>(index)] = std::memcmp(a + begin, b + begin, size) != 0;
  });
  const auto found = std::find(differs.begin(), differs.end(), 1);
  if (found == differs.end()) return bytes;
  std::size_t at = static_cast<std::size_t>(found - differs.begin()) * piece;
  while (a[at] == b[at]) ++at;
  return at;
}

std::string coordinates(std::int64_t index, std::int64_t columns) {
  return fmt::format("[{}, {}]", index / columns, index % columns);
}

namespace {

/// Eight bytes at a time: byte by byte, FNV-1a would take as long as the verification itself. The
/// multiplier is that of fnv1a; the shift brings the high bits, which it mixes best, back down.
std::uint64_t hash_of_piece(const std::byte* data, std::size_t bytes) {
  std::uint64_t state = fnv1a_offset;
  std::size_t at = 0;
  for (; at + sizeof state <= bytes; at += sizeof state) {
    std::uint64_t word;
    std::memcpy(&word, data + at, sizeof word);
    state = (state ^ word) * 0x100000001b3u;
    state ^= state >> 32;
  }
  return fnv1a({reinterpret_cast<const char*>(data) + at, bytes - at}, state);
}

}  // namespace

std::uint64_t hash_of_bits(const std::byte* data, std::size_t bytes, Parallel& parallel) {
  constexpr std::size_t piece = std::size_t{1} << 18;
  std::vector<std::uint64_t> hashes((bytes + piece - 1) / piece);
  parallel.run(static_cast<int>(hashes.size()), parallel.max_threads(), [&](int index) {
    const std::size_t begin = static_cast<std::size_t>(index) * piece;
    hashes[static_cast<std::size_t>(index)] =
        hash_of_piece(data + begin, std::min(piece, bytes - begin));
  });
  return fnv1a({reinterpret_cast<const char*>(hashes.data()), hashes.size() * sizeof hashes[0]});
}

}  // namespace fftune
