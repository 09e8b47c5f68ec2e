#include "verify/truth.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

#include "core/error.hpp"
#include "device/parallel.hpp"
#include "verify/verifier.hpp"

namespace fftune {
namespace {

/// The square root of E[p^4] / E[p^2]^2 of p = exp(x), x normal with deviation 1: n such values
/// average errors as n / heavy_tail^2 equal ones would.
constexpr double heavy_tail = 7.39;

/// The error of rounding a normally distributed value, in unit roundoffs (docs/precision.md).
constexpr double usual_rounding = 0.43;

/// Squares of values and of their rounding errors; they are added up in the order of the rows, so
/// that a sum does not depend on the threads.
struct Squares {
  double values = 0;
  double errors = 0;
  std::int64_t finite = 0;  // of how many values
};

Squares squares_of(DType dtype, std::span<const double> exact, const double* before_rounding) {
  constexpr std::size_t most = 1024;
  std::array<std::byte, most * sizeof(double)> bytes;
  std::array<double, most> rounded;
  Squares squares;
  for (std::size_t first = 0; first < exact.size(); first += most) {
    const std::size_t count = std::min(most, exact.size() - first);
    encode(dtype, std::span<const double>(before_rounding + first, count), bytes.data());
    decode(dtype, bytes.data(), std::span<double>(rounded.data(), count));
    for (std::size_t i = 0; i < count; ++i) {
      const double value = exact[first + i];
      if (!std::isfinite(value)) continue;  // meant, and compared exactly
      ++squares.finite;
      const double error = rounded[i] - value;
      squares.values += value * value;
      squares.errors += error * error;
    }
  }
  return squares;
}

}  // namespace

Truth::Truth(const Op& op, Problem problem, InputData data, Parallel& parallel, ReferenceFile* kept)
    : parallel_(&parallel),
      rows_(op, std::move(problem), data, parallel),
      references_(rows_, parallel, kept) {
  for (const auto& group : data.substitutes) {
    auto& own = substitutes_.emplace_back();
    for (const GivenTensors* given : group)
      own.push_back(
          std::make_unique<Substitute>(op, rows_.problem(), InputData(data.seed, given), parallel));
  }
}

void Truth::retoken(std::int64_t tokens) {
  rows_.retoken(tokens);
  references_.follow();
  for (const auto& group : substitutes_)
    for (const auto& substitute : group) {
      substitute->rows.retoken(tokens);
      substitute->references.follow();
    }
  encoded_.clear();
  expected_.clear();
}

const std::vector<std::byte>& Truth::encoded(std::size_t tensor, std::size_t first_stage) {
  const auto& drawn = rows_.drawn(tensor);
  if (!drawn.empty() && (producer(tensor) == stages().size() || producer(tensor) >= first_stage))
    return drawn;
  if (const auto known = encoded_.find(tensor); known != encoded_.end()) return known->second;
  const auto values = references_.rows(producer(tensor), tensor);
  const DType dtype = tensors()[tensor].dtype;
  const auto width = static_cast<std::size_t>(columns(tensor));
  auto bytes = large_vector<std::byte>(values.size() * width * dtype_bytes(dtype), *parallel_);
  for_each_row(values.size(), width, *parallel_, [&](std::size_t row) {
    encode(dtype, std::span<const double>(values[row], width),
           bytes.data() + row * width * dtype_bytes(dtype));
  });
  return encoded_[tensor] = std::move(bytes);
}

std::int64_t Truth::live_rows(std::size_t tensor) {
  const std::string& counts = tensors()[tensor].live_rows;
  if (counts.empty()) return rows(tensor);
  const std::size_t counter = tensor_index(tensors(), counts);
  const DType dtype = tensors()[counter].dtype;
  const std::vector<std::byte>& bytes = encoded(counter, stages().size());
  std::array<double, 1> last{};
  decode(dtype, bytes.data() + bytes.size() - dtype_bytes(dtype), std::span<double>(last));
  return std::clamp<std::int64_t>(std::llround(last[0]), 0, rows(tensor));
}

void Truth::measure(std::size_t tensor, std::int64_t rows,
                    const std::vector<const double*>& before_rounding, Expected& expected) const {
  const auto& spec = tensors()[tensor];
  const auto width = static_cast<std::size_t>(columns(tensor));
  const std::int64_t* const sources = this->sources(tensor);
  std::vector<std::int64_t> times(expected.rows.size());
  for (std::int64_t row = 0; row < rows; ++row)
    ++times[static_cast<std::size_t>(sources != nullptr ? sources[row] : row % std::ssize(times))];
  std::vector<Squares> of_rows(times.size());
  for_each_row(times.size(), width, *parallel_, [&](std::size_t row) {
    of_rows[row] = squares_of(spec.dtype, {expected.rows[row], width}, before_rounding[row]);
  });
  // A tensor that is updated in place may be a cache with few written rows. The others are exact:
  // among them the errors of those few would seem as small as they are rare.
  const bool any_rounded = std::any_of(of_rows.begin(), of_rows.end(),
                                       [](const Squares& row) { return row.errors > 0; });
  const bool skips = spec.role == Role::updated && any_rounded;
  Squares all;
  std::int64_t counted = 0;
  for (std::size_t row = 0; row < times.size(); ++row) {
    if (times[row] == 0 || (skips && !(of_rows[row].errors > 0))) continue;
    all.values += of_rows[row].values * static_cast<double>(times[row]);
    all.errors += of_rows[row].errors * static_cast<double>(times[row]);
    all.finite += of_rows[row].finite * times[row];
    counted += times[row];
    expected.distinct += of_rows[row].finite;
  }
  if (!std::isfinite(all.values) || !std::isfinite(all.errors))
    throw Error(ErrorKind::internal,
                fmt::format("{}: the reference of '{}' leaves the range of {}: its inputs' scales "
                            "are too large",
                            problem().text(), spec.name, dtype_name(spec.dtype)));
  expected.distinct = std::max<std::int64_t>(1, expected.distinct);
  expected.norm = std::sqrt(all.values);
  expected.root_mean_square =
      std::sqrt(all.values / static_cast<double>(std::max<std::int64_t>(1, all.finite)));
  expected.rounding_error = all.values == 0 ? 0 : std::sqrt(all.errors / all.values);
  if (!rows_.any_given() || !(all.errors > 0)) return;
  const double usual = all.errors / static_cast<double>(counted);
  for (const Squares& row : of_rows)
    expected.row_factors.push_back(std::max(1.0, std::sqrt(row.errors / usual)));
}

bool Truth::updates_by_rounded(std::size_t first_stage, std::size_t tensor) const {
  const TensorSpec& spec = tensors()[tensor];
  if (spec.role != Role::updated || is_integer(spec.dtype)) return false;
  for (std::size_t k = first_stage; k < producer(tensor); ++k)
    for (const std::string& name : stages()[k].outputs)
      if (dtype_unit_roundoff(tensors()[tensor_index(tensors(), name)].dtype) >
          dtype_unit_roundoff(spec.dtype))
        return true;
  return false;
}

void Truth::find_independent(std::size_t first_stage, std::size_t tensor, Expected& expected) {
  const auto width = static_cast<std::size_t>(columns(tensor));
  const auto has_nan = [width](const double* row) {
    return std::any_of(row, row + width, [](double value) { return std::isnan(value); });
  };
  if (std::none_of(expected.rows.begin(), expected.rows.end(), has_nan)) return;
  expected.independent.assign(expected.rows.size(), std::vector<double>(width, std::nan("")));
  for (const auto& group : substitutes_) {
    std::vector<std::vector<const double*>> others;
    for (const auto& substitute : group)
      others.push_back(substitute->references.rows(first_stage, tensor));
    for (std::size_t row = 0; row < expected.rows.size(); ++row)
      for (std::size_t i = 0; i < width; ++i) {
        const double number = others.front()[row][i];
        double& independent = expected.independent[row][i];
        if (!std::isnan(expected.rows[row][i]) || !std::isnan(independent)) continue;
        if (std::isfinite(number) && std::all_of(others.begin(), others.end(), [&](auto& rows) {
              return rows[row][i] == number;
            }))
          independent = number;
      }
  }
  // The verifier counts these numbers: of few, those may round worst.
  Squares all;
  for (const auto& row : expected.independent) {
    const Squares own = squares_of(tensors()[tensor].dtype, row, row.data());
    all.values += own.values;
    all.errors += own.errors;
  }
  if (all.values > 0)
    expected.rounding_error = std::max(expected.rounding_error, std::sqrt(all.errors / all.values));
}

const Expected& Truth::expected(std::size_t first_stage, std::size_t tensor) {
  const auto key = std::pair(first_stage, tensor);
  if (const auto known = expected_.find(key); known != expected_.end()) return known->second;
  const auto& spec = tensors()[tensor];
  const std::size_t stage = producer(tensor);
  Expected expected;
  expected.rows = references_.rows(first_stage, tensor);
  if (sources(tensor) == nullptr) expected.rows.resize(static_cast<std::size_t>(period(tensor)));
  const auto before_rounding = references_.rows(stage, tensor);
  measure(tensor, live_rows(tensor), before_rounding, expected);
  if (updates_by_rounded(first_stage, tensor)) expected.rounded = before_rounding;
  if (!substitutes_.empty()) find_independent(first_stage, tensor, expected);

  // The roundings of what is summed are independent of each other and of that of the sum, and as
  // large relative to its usual size: their squares add. With few values, some outweigh the others
  // by far, and their error may be the worst one. So may that of the sum, which differs from the
  // reference by them and thus rounds elsewhere.
  double outer = expected.rounding_error, squares = 0;
  bool rounds_operands = false;
  for (std::size_t k = first_stage; k <= stage; ++k) {
    const StageSpec& spec_of_stage = stages()[k];
    expected.reduction_length += spec_of_stage.reduction_length;
    const double share = spec_of_stage.inner_values > 0
                             ? std::min(1.0, heavy_tail / std::sqrt(spec_of_stage.inner_values))
                             : 0;
    if (spec_of_stage.inner_roundings == 0) continue;
    outer = std::max(outer, share * dtype_unit_roundoff(spec.dtype));
    double own = outer;
    // Values without number, of a recurrence: an output of a wider dtype has the error of their
    // rounding to the op's dtype, too.
    if (std::isinf(spec_of_stage.inner_values)) {
      own = std::max(own, usual_rounding * dtype_unit_roundoff(problem().dtype));
      rounds_operands = true;
    }
    const double inner = own * cancellation(expected.distinct);
    squares += spec_of_stage.inner_roundings * inner * inner;
  }
  expected.rounding_error = std::hypot(outer, std::sqrt(squares));
  // The rounding errors of few elements may be small by chance: the estimate is at least the worst
  // case, one unit roundoff per stage, over the square root of the number of elements.
  const double worst =
      dtype_unit_roundoff(spec.dtype) * static_cast<double>(stage - first_stage + 1);
  expected.rounding_error =
      std::max(expected.rounding_error, worst / std::sqrt(static_cast<double>(expected.distinct)));
  // Sums of fp8 products that end in fp16: they are off by more than its rounding.
  const auto reads_fp8 = [&](const StageSpec& of) {
    return std::any_of(of.inputs.begin(), of.inputs.end(), [&](const std::string& name) {
      return tensors()[tensor_index(tensors(), name)].dtype == DType::fp8;
    });
  };
  if (spec.dtype == DType::fp16 && reads_fp8(stages()[stage]))
    expected.rounding_error =
        std::hypot(expected.rounding_error, fp8_sum_error * cancellation(expected.distinct));
  // The coarsest dtype on the path decides, including those of intermediates. Other outputs of the
  // last stage are not on the path; they count for an f32 tensor alone, whose own rounding would
  // not cover the error of fp8 accumulation.
  DType coarsest = spec.dtype;
  if (rounds_operands && dtype_unit_roundoff(problem().dtype) > dtype_unit_roundoff(coarsest))
    coarsest = problem().dtype;
  const std::size_t end = spec.dtype == DType::f32 ? stage + 1 : stage;
  for (std::size_t k = first_stage; k < end; ++k)
    for (const auto& name : stages()[k].outputs) {
      const DType other = tensors()[tensor_index(tensors(), name)].dtype;
      if (dtype_unit_roundoff(other) > dtype_unit_roundoff(coarsest)) coarsest = other;
    }
  // The cap is that of a pipeline with three roundings; expanded weights are rounded besides.
  std::int64_t roundings = 1;
  if (!rows_.op().parts(problem()).empty())
    roundings = static_cast<std::int64_t>(stage - first_stage + 1);
  int expanded = 0;
  for (std::size_t k = first_stage; k <= stage; ++k) expanded += stages()[k].expanded_weights;
  if (expanded > 0) roundings = std::max<std::int64_t>(roundings, 3) + expanded;
  expected.tolerance = tolerance(coarsest, expected.rounding_error, expected.reduction_length,
                                 expected.distinct, roundings);
  return expected_[key] = std::move(expected);
}

}  // namespace fftune
