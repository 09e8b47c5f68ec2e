#include "verify/verifier.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <span>
#include <utility>

#include "core/error.hpp"
#include "core/hash.hpp"
#include "device/parallel.hpp"
#include "verify/comparison.hpp"
#include "verify/device_tensors.hpp"
#include "verify/host_threads.hpp"
#include "verify/truth.hpp"

namespace fftune {
namespace {

// Contents of outputs and workspace before each run. The first is a NaN in every dtype, so that an
// element left unwritten shows; the second a number, so that memory read before it is written moves
// the result.
constexpr std::uint8_t first_poison = 0xff;
constexpr std::uint8_t second_poison = 0x5a;

/// An element may be off by twice the roundings of its own size: once for the output's, once for
/// the tie that the other rounding broke the other way. It may also be off by 16 times the error
/// that the norm allows on average: the intermediates' roundings add up like a normal distribution,
/// whose 10^9th sample is within 6.1 standard deviations.
constexpr double element_roundings = 2;
constexpr double element_deviations = 16;

}  // namespace

struct Verifier::State {
  State(Backend& device, const Op& op, Problem problem, InputData data, ReferenceFile* kept,
        CancelFlags cancel)
      : backend(&device),
        threads(device),
        for_references(threads, cancel.references),
        for_inputs(threads, cancel.inputs),
        truth(op, std::move(problem), std::move(data), for_references, kept),
        tensors(device, truth, for_inputs) {
    tensors.fit();
  }

  void check_run(std::size_t first, std::size_t count, const Executables& executables) const;
  void provide_inputs(std::size_t first, std::size_t end);
  void execute(std::size_t first, std::size_t end, const Executables& executables,
               const std::vector<bool>& used, std::uint8_t poison);
  std::string check_values(std::size_t first, std::size_t end, Verification& verification);
  /// Gives rows that chose another id than the reference does, whose score is as large but for
  /// rounding, the reference's id in `result`.
  void accept_choices(std::size_t first, std::size_t tensor, std::vector<std::byte>& result);
  /// The distinct rows of a tensor that a run reads or writes, and by how much an element of
  /// magnitude 1, or of none, may be off.
  std::vector<std::vector<double>> rows_of(std::size_t first, std::size_t tensor,
                                           double& relative_bound, double& absolute_bound);
  std::string check_repetition(std::size_t first, std::size_t end);
  /// Whether the run writes a tensor whose bits may differ from run to run.
  bool has_any_order(std::size_t first, std::size_t end) const;
  std::string check_inputs(std::size_t first, std::size_t end);
  /// Hash of the first run's results.
  std::string bits(std::size_t first, std::size_t end);

  /// Calls visit(tensor) for the tensors that the stages [first, end) write, or only read.
  template <typename Visit>
  void for_each_written(std::size_t first, std::size_t end, const Visit& visit) const {
    for (std::size_t i = 0; i < truth.tensors().size(); ++i)
      if (const auto stage = truth.producer(i); stage >= first && stage < end) visit(i);
  }
  template <typename Visit>
  void for_each_read(std::size_t first, std::size_t end, const Visit& visit) const;

  bool updates(std::size_t tensor) const;

  /// Bytes that a run writes, up to the last row that has values.
  std::size_t live_bytes(std::size_t tensor) {
    return static_cast<std::size_t>(truth.live_rows(tensor) * truth.columns(tensor)) *
           dtype_bytes(truth.tensors()[tensor].dtype);
  }

  /// Whether a tensor that the run writes is an output of it. An intermediate between two of its
  /// stages may never be written: a family that covers both need not store it.
  bool leaves_run(std::size_t tensor, std::size_t end) const;

  Backend* backend;
  ProvenProducts threads;
  CancellableParallel for_references, for_inputs;
  Truth truth;
  DeviceTensors tensors;
  std::vector<std::vector<std::byte>> results{truth.tensors().size()};  // of the first run
  std::vector<std::byte> repeated;                                      // a part of the second
  std::vector<std::int64_t> accepted;  // rows of the ids that accept_choices() changed last
};

template <typename Visit>
void Verifier::State::for_each_read(std::size_t first, std::size_t end, const Visit& visit) const {
  for (std::size_t i = 0; i < truth.tensors().size(); ++i) {
    const auto producer = truth.producer(i);
    if (producer >= first && producer < end) continue;
    for (std::size_t stage = first; stage < end; ++stage) {
      const auto& inputs = truth.stages()[stage].inputs;
      if (std::find(inputs.begin(), inputs.end(), truth.tensors()[i].name) == inputs.end())
        continue;
      visit(i);
      break;
    }
  }
}

bool Verifier::State::leaves_run(std::size_t tensor, std::size_t end) const {
  if (truth.tensors()[tensor].role == Role::output || updates(tensor)) return true;
  for (std::size_t stage = end; stage < truth.stages().size(); ++stage) {
    const auto& inputs = truth.stages()[stage].inputs;
    if (std::find(inputs.begin(), inputs.end(), truth.tensors()[tensor].name) != inputs.end())
      return true;
  }
  return false;
}

void Verifier::State::check_run(std::size_t first, std::size_t count,
                                const Executables& executables) const {
  const std::size_t stages = truth.stages().size();
  if (count == 0 || first >= stages || count > stages - first)
    throw Error(ErrorKind::internal,
                fmt::format("verify: stages {} to {} of {}: there are {}", first, first + count,
                            truth.problem().text(), stages));
  for (const auto& executable : executables)
    if (!executable) throw Error(ErrorKind::internal, "verify: an executable is missing");
}

void Verifier::State::provide_inputs(std::size_t first, std::size_t end) {
  for_each_read(first, end, [&](std::size_t tensor) {
    // Another run may have found it as it was before it is updated.
    if (updates(tensor))
      tensors.provide_anew(tensor, first);
    else
      tensors.provide(tensor, first);
  });
}

bool Verifier::State::updates(std::size_t tensor) const {
  return truth.tensors()[tensor].role == Role::updated;
}

void Verifier::State::execute(std::size_t first, std::size_t end, const Executables& executables,
                              const std::vector<bool>& used, std::uint8_t poison) {
  for_each_written(first, end, [&](std::size_t tensor) {
    if (updates(tensor))
      tensors.provide_anew(tensor, first);
    else if (used.empty() || used[tensor] || leaves_run(tensor, end))
      tensors.poison(tensor, poison);
  });
  std::size_t workspace_bytes = 0;
  for (const auto& executable : executables)
    workspace_bytes = std::max(workspace_bytes, executable->workspace_bytes());
  void* const workspace = tensors.workspace(workspace_bytes, poison);
  for (const auto& executable : executables)
    executable->enqueue(tensors.addresses(), workspace, backend->stream());
  backend->synchronize();
}

std::string Verifier::State::check_values(std::size_t first, std::size_t end,
                                          Verification& verification) {
  std::string failure;
  for_each_written(first, end, [&](std::size_t tensor) {
    if (!failure.empty() || !leaves_run(tensor, end)) return;
    const auto& spec = truth.tensors()[tensor];
    const Expected& expected = truth.expected(first, tensor);
    auto& result = results[tensor];
    if (result.size() != spec.bytes()) {
      result = {};
      result = large_vector<std::byte>(spec.bytes(), threads);
    }
    backend->read(result.data(), tensors.addresses()[tensor], result.size());
    RepeatedRows shape{spec.dtype, truth.live_rows(tensor), truth.columns(tensor),
                       truth.period(tensor), truth.sources(tensor)};
    if (!expected.row_factors.empty()) shape.factors = expected.row_factors.data();
    std::vector<const double*> independent;
    for (const auto& row : expected.independent) independent.push_back(row.data());
    if (!independent.empty()) shape.independent = &independent;
    if (!expected.rounded.empty()) shape.rounded = &expected.rounded;
    double size = expected.root_mean_square;
    if (spec.alike > 0) {
      // Rounding is relative to a row's own elements. The sums behind these are not: where terms
      // that are as large as any cancel, their errors in fp32 stay.
      shape.alike = spec.alike;
      shape.least_bound = element_deviations * size *
                          tolerance(DType::f32, 0, expected.reduction_length, spec.elements());
      size = 1;
    }
    const auto roundings = static_cast<double>(truth.producer(tensor) - first + 1);
    std::vector<std::byte> chosen;
    if (!spec.choice.from.empty() || !spec.of_choice.empty()) {
      chosen = result;
      accept_choices(first, tensor, chosen);
    }
    // Ids and counts are exact, whatever the sums behind a choice are.
    if (is_integer(spec.dtype) && (!chosen.empty() || updates(tensor))) size = 0;
    const Difference difference =
        compare(shape, chosen.empty() ? result.data() : chosen.data(), expected.rows,
                element_roundings * roundings * dtype_unit_roundoff(spec.dtype),
                element_deviations * expected.tolerance * size, threads);
    const double norm = std::hypot(expected.norm, difference.of_independent);
    const double error = difference.norm == 0 ? 0 : difference.norm / norm;
    const bool worst = verification.tolerance == 0 ||
                       error / expected.tolerance > verification.error / verification.tolerance;
    if (worst) {
      verification.error = error;
      verification.tolerance = expected.tolerance;
    }
    if (difference.unwritten > 0) {
      failure = fmt::format("{}: {} of {} elements were not written, the first at {}", spec.name,
                            difference.unwritten, spec.elements(),
                            coordinates(difference.first_unwritten, shape.columns));
    } else if (difference.outliers > 0) {
      failure = fmt::format(
          "{}: {} of {} elements are wrong, the first {} is {:.6g} instead of "
          "{:.6g}; relative error {:.2e}, tolerance {:.2e}",
          spec.name, difference.outliers, spec.elements(),
          coordinates(difference.first_outlier, shape.columns), difference.outlier_value,
          difference.outlier_reference, error, expected.tolerance);
    } else if (!(error <= expected.tolerance)) {
      failure = fmt::format("{}: relative error {:.2e} exceeds the tolerance {:.2e}", spec.name,
                            error, expected.tolerance);
    }
  });
  return failure;
}

std::vector<std::vector<double>> Verifier::State::rows_of(std::size_t first, std::size_t tensor,
                                                          double& relative_bound,
                                                          double& absolute_bound) {
  const auto width = static_cast<std::size_t>(truth.columns(tensor));
  const DType dtype = truth.tensors()[tensor].dtype;
  std::vector<std::vector<double>> rows;
  relative_bound = absolute_bound = 0;
  const std::size_t producer = truth.producer(tensor);
  // A choice is by what a tensor is before it is updated.
  if (producer >= first && producer < truth.stages().size() && !updates(tensor)) {
    const Expected& expected = truth.expected(first, tensor);
    for (const double* row : expected.rows) rows.emplace_back(row, row + width);
    relative_bound =
        element_roundings * static_cast<double>(producer - first + 1) * dtype_unit_roundoff(dtype);
    absolute_bound = element_deviations * expected.tolerance * expected.root_mean_square;
    return rows;
  }
  const auto& bytes = truth.encoded(tensor, first);
  for (std::int64_t row = 0; row < truth.period(tensor); ++row) {
    rows.emplace_back(width);
    decode(dtype, bytes.data() + static_cast<std::size_t>(row) * width * dtype_bytes(dtype),
           std::span<double>(rows.back()));
  }
  return rows;
}

namespace {

/// Scores that are not the elements themselves are computed in fp32.
constexpr double score_roundoff = 0x1p-21;

/// Whether the ids are different ones, each with a score near that of the right one at its place.
bool are_near(const IdChoice& choice, const std::vector<double>& elements,
              std::span<const double> ids, std::span<const double> right, double relative_bound,
              double absolute_bound) {
  std::vector<double> scores = elements;
  choice.score(scores, {}, 0);
  std::set<double> seen;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (!(ids[i] >= 0 && ids[i] < static_cast<double>(scores.size())) ||
        !seen.insert(ids[i]).second)
      return false;
    const auto own = static_cast<std::size_t>(ids[i]), best = static_cast<std::size_t>(right[i]);
    const double roundoff = scores == elements ? 0 : score_roundoff;
    const double allowed =
        2 * absolute_bound +
        (relative_bound + roundoff) * (std::abs(elements[own]) + std::abs(elements[best]));
    if (own != best && !(std::abs(scores[own] - scores[best]) <= allowed)) return false;
  }
  return true;
}

/// Whether a list of ids is that of `right`, but for places whose scores are near those of the
/// places that they replace. Ids [rows, lists, n] are the places of the n best scores of a list in
/// ascending order, with -1 behind them where there are fewer.
bool are_near_ascending(std::span<const double> elements, std::span<const double> ids,
                        std::span<const double> right, double relative_bound,
                        double absolute_bound) {
  std::vector<double> own, missing;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if ((ids[i] == -1) != (right[i] == -1)) return false;
    if (ids[i] == -1) continue;
    if (!(ids[i] >= 0 && ids[i] < static_cast<double>(elements.size())) ||
        (i > 0 && !(ids[i] > ids[i - 1])))
      return false;
    const auto has = [](std::span<const double> list, double id) {
      return std::find(list.begin(), list.end(), id) != list.end();
    };
    if (!has(right, ids[i])) own.push_back(elements[static_cast<std::size_t>(ids[i])]);
    if (!has(ids, right[i])) missing.push_back(elements[static_cast<std::size_t>(right[i])]);
  }
  if (missing.empty()) return true;
  const double least = *std::min_element(own.begin(), own.end()),
               most = *std::max_element(missing.begin(), missing.end());
  return std::isfinite(least) &&
         most - least <= 2 * absolute_bound + relative_bound * (std::abs(most) + std::abs(least));
}

}  // namespace

void Verifier::State::accept_choices(std::size_t first, std::size_t tensor,
                                     std::vector<std::byte>& result) {
  const TensorSpec& spec = truth.tensors()[tensor];
  const Expected& expected = truth.expected(first, tensor);
  const auto width = static_cast<std::size_t>(truth.columns(tensor));
  const std::size_t bytes = width * dtype_bytes(spec.dtype);
  const std::int64_t* const sources = truth.sources(tensor);
  const auto source_of = [&](std::int64_t row) {
    return static_cast<std::size_t>(sources != nullptr ? sources[row] : row % truth.period(tensor));
  };
  const auto take_reference = [&](std::int64_t row) {
    encode(spec.dtype, std::span<const double>(expected.rows[source_of(row)], width),
           result.data() + static_cast<std::size_t>(row) * bytes);
  };
  if (!spec.of_choice.empty()) {
    for (const std::int64_t row : accepted) take_reference(row);
    return;
  }
  accepted.clear();
  std::vector<double> ids(static_cast<std::size_t>(truth.rows(tensor)) * width);
  decode(spec.dtype, result.data(), std::span<double>(ids));
  double relative_bound = 0, absolute_bound = 0, exact = 0;
  std::vector<std::vector<double>> scores, by;
  for (std::int64_t row = 0; row < truth.rows(tensor); ++row) {
    const std::size_t source = source_of(row);
    const std::span<const double> own_ids(ids.data() + static_cast<std::size_t>(row) * width,
                                          width),
        best_ids(expected.rows[source], width);
    if (std::equal(own_ids.begin(), own_ids.end(), best_ids.begin())) continue;
    const double id = own_ids.front(), best = best_ids.front();
    if (scores.empty()) {
      scores = rows_of(first, tensor_index(truth.tensors(), spec.choice.from), relative_bound,
                       absolute_bound);
      for (const std::string& name : spec.choice.by) {
        by.emplace_back();
        for (const auto& value : rows_of(first, tensor_index(truth.tensors(), name), exact, exact))
          by.back().push_back(value.front());
      }
    }
    // The id has to be a possible one, with a score near that of the best of those that are sure.
    const std::vector<double>& given = scores[source];
    if (spec.shape.size() > 2) {
      const auto lists = static_cast<std::size_t>(spec.shape[1]);
      const auto list_of = [&](std::span<const double> all, std::size_t list) {
        return all.subspan(all.size() / lists * list, all.size() / lists);
      };
      bool good = true;
      for (std::size_t list = 0; good && list < lists; ++list)
        good = are_near_ascending(list_of(given, list), list_of(own_ids, list),
                                  list_of(best_ids, list), relative_bound, absolute_bound);
      if (!good) continue;
      take_reference(row);
      accepted.push_back(row);
      continue;
    }
    if (width > 1) {
      if (are_near(spec.choice, given, own_ids, best_ids, relative_bound, absolute_bound)) {
        take_reference(row);
        accepted.push_back(row);
      }
      continue;
    }
    std::vector<double> own = given, sure = given, parameters;
    if (!(id >= 0 && id < static_cast<double>(own.size()))) continue;
    for (const auto& values : by) parameters.push_back(values[source]);
    const auto bound = [&](std::size_t i) {
      return relative_bound * std::abs(given[i]) + absolute_bound;
    };
    double slack = 0;
    for (std::size_t i = 0; i < given.size(); ++i) slack = std::max(slack, bound(i));
    const double growth = spec.choice.score(own, parameters, slack);
    spec.choice.score(sure, parameters, -slack);
    const auto rival =
        static_cast<std::size_t>(std::max_element(sure.begin(), sure.end()) - sure.begin());
    double allowed = growth * (bound(static_cast<std::size_t>(id)) + bound(rival));
    const double score = own[static_cast<std::size_t>(id)], best_score = sure[rival];
    if (own != given) allowed += score_roundoff * (std::abs(score) + std::abs(best_score));
    const bool is_known = !std::isnan(given[static_cast<std::size_t>(best)]);
    if (!is_known || score == -std::numeric_limits<double>::infinity() ||
        !(score + allowed >= best_score))
      continue;
    take_reference(row);
    accepted.push_back(row);
  }
}

std::string Verifier::State::check_repetition(std::size_t first, std::size_t end) {
  constexpr std::size_t part = std::size_t{64} << 20;
  std::string failure;
  for_each_written(first, end, [&](std::size_t tensor) {
    if (!leaves_run(tensor, end) || truth.tensors()[tensor].any_order) return;
    const auto& result = results[tensor];
    const std::size_t end_of_rows = live_bytes(tensor);
    const auto* const device = static_cast<const std::byte*>(tensors.addresses()[tensor]);
    for (std::size_t begin = 0; begin < end_of_rows && failure.empty(); begin += part) {
      const std::size_t size = std::min(part, end_of_rows - begin);
      repeated.resize(std::max(repeated.size(), size));
      backend->read(repeated.data(), device + begin, size);
      const std::size_t same =
          first_difference(result.data() + begin, repeated.data(), size, threads);
      if (same == size) continue;
      const auto& spec = truth.tensors()[tensor];
      const auto element = static_cast<std::int64_t>((begin + same) / dtype_bytes(spec.dtype));
      failure = fmt::format(
          "{}{} differs between two runs on the same inputs: a race, or memory "
          "read before it is written",
          spec.name, coordinates(element, truth.columns(tensor)));
    }
  });
  return failure;
}

bool Verifier::State::has_any_order(std::size_t first, std::size_t end) const {
  bool found = false;
  for_each_written(first, end,
                   [&](std::size_t tensor) { found |= truth.tensors()[tensor].any_order; });
  return found;
}

std::string Verifier::State::check_inputs(std::size_t first, std::size_t end) {
  std::string failure;
  for_each_read(first, end, [&](std::size_t tensor) {
    if (failure.empty()) failure = tensors.change(tensor, first);
  });
  return failure;
}

std::string Verifier::State::bits(std::size_t first, std::size_t end) {
  std::uint64_t state = fnv1a_offset;
  for_each_written(first, end, [&](std::size_t tensor) {
    if (!leaves_run(tensor, end) || truth.tensors()[tensor].any_order) return;
    state = fnv1a(truth.tensors()[tensor].name, state);
    state = fnv1a(hex(hash_of_bits(results[tensor].data(), live_bytes(tensor), threads)), state);
  });
  return hex(state);
}

Verifier::Verifier(Backend& backend, const Op& op, Problem problem, InputData data,
                   ReferenceFile* kept, CancelFlags cancel)
    : state_(std::make_unique<State>(backend, op, std::move(problem), std::move(data), kept,
                                     cancel)) {}

Verifier::~Verifier() = default;

void Verifier::retoken(std::int64_t tokens) {
  state_->truth.retoken(tokens);
  state_->tensors.fit();
}

const Problem& Verifier::problem() const {
  return state_->truth.problem();
}

Verification Verifier::verify(std::size_t first_stage, std::size_t stage_count,
                              const Executables& executables, const std::vector<bool>& used) {
  State& state = *state_;
  state.check_run(first_stage, stage_count, executables);
  const std::size_t end = first_stage + stage_count;
  Verification verification;
  state.provide_inputs(first_stage, end);
  state.execute(first_stage, end, executables, used, first_poison);
  verification.failure = state.check_values(first_stage, end, verification);
  // In any case: a peer whose results are right waits for the second collective.
  state.execute(first_stage, end, executables, used, second_poison);
  if (verification.failure.empty()) {
    verification.failure = state.check_repetition(first_stage, end);
    if (verification.failure.empty() && state.has_any_order(first_stage, end))
      verification.failure = state.check_values(first_stage, end, verification);
  }
  // A write out of bounds is reported first: it may be the cause of the other failures.
  auto damage = state.tensors.damage();
  if (damage.empty()) damage = state.check_inputs(first_stage, end);
  verification.wrote_beyond = !damage.empty();
  if (verification.wrote_beyond) verification.failure = std::move(damage);
  verification.passed = verification.failure.empty();
  if (verification.passed) {
    verification.bits = state.bits(first_stage, end);
    // The result confirms the reference too.
    state.truth.keep();
  } else {
    state.tensors.restore();
  }
  return verification;
}

// The tolerance of a verification; docs/precision.md derives it.

namespace {

/// Covers what the model leaves out: intermediates that round the other way because their fp32 sum
/// differs, approximations of the activation, truncating tensor-core adders.
constexpr double safety_factor = 1.4;

/// Error of PyTorch's compiled bf16 pipeline; no variant may be worse.
constexpr double bf16_cap = 3.5e-3;
/// Roundings of that pipeline: gate, up and their product.
constexpr double roundings_of_cap = 3;

}  // namespace

double tolerance(DType dtype, double rounding_error, std::int64_t reduction_length,
                 std::int64_t elements, std::int64_t stages) {
  // Rounding is to nearest, so an error e of the fp32 value before it adds at most 2e to the error
  // after it. A sum of n random terms in fp32 is off by less than sqrt(n) u of its own size; 8 u
  // more stand for the activation and the products of the epilogue.
  const double sum_error =
      (std::ldexp(1.0, -24) * (std::sqrt(static_cast<double>(reduction_length)) + 8) +
       (dtype == DType::fp8 ? fp8_sum_error : 0)) *
      cancellation(elements);
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
