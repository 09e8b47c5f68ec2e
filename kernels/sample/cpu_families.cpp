// sample on the CPU: parts of rows share out among threads; a filtered row is a task.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/sampling.cuh"
#include "kernels/common/stage_family.hpp"
#include "kernels/sample/sample.hpp"

namespace fftune::sample {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

/// The best id of a part of a row, and the sum of exp(logit - largest).
struct Best {
  int rank = std::numeric_limits<int>::min();
  std::int64_t id = 0;
  float logit = -infinity;
  float largest = -infinity, sum = 0;

  void add(float score, float value, std::int64_t index) {
    const int own = rank_of(score);
    if (own > rank) rank = own, id = index, logit = value;
  }
  void add_probability(float value) {
    if (value > largest) {
      sum = sum * std::exp(largest - value) + 1;
      largest = value;
    } else if (value != -infinity) {
      sum += std::exp(value - largest);
    }
  }
  /// The parts of a row come in its order.
  void add(const Best& next) {
    if (next.rank > rank) rank = next.rank, id = next.id, logit = next.logit;
    if (next.largest == -infinity && !std::isnan(next.sum)) return;
    if (next.largest > largest) {
      sum = sum * std::exp(largest - next.largest) + next.sum;
      largest = next.largest;
    } else {
      sum += next.sum * std::exp(next.largest - largest);
    }
  }
};

/// Parameters of a row beside its logits.
struct RowDraw {
  draw_of_row draw;
  std::int64_t top_k = 0;
  float top_p = 1, min_p = 0;

  bool draws() const { return draw.temperature > 0; }
};

/// The least key that stays: the sum of what better ids weigh is below `limit`.
template <typename Weight>
std::uint32_t threshold(std::span<const std::uint32_t> keys, std::uint64_t limit,
                        const Weight& weight) {
  std::uint32_t prefix = 0;
  for (int digit = 0; digit < key_digits; ++digit) {
    std::vector<std::uint64_t> bins(most_bins);
    const int shift = digit_shift(digit), above = shift + digit_bits(digit);
    for (std::size_t i = 0; i < keys.size(); ++i)
      if (digit == 0 || keys[i] >> above == prefix)
        bins[keys[i] >> shift & ((1u << digit_bits(digit)) - 1)] += weight(i);
    int bin = (1 << digit_bits(digit)) - 1;
    for (; bin > 0 && bins[static_cast<std::size_t>(bin)] < limit; --bin)
      limit -= bins[static_cast<std::size_t>(bin)];
    prefix = prefix << digit_bits(digit) | static_cast<std::uint32_t>(bin);
  }
  return prefix;
}

/// Which logits of a row the filter keeps.
class Filter {
 public:
  Filter(std::span<const float> logits, const RowDraw& row, float reciprocal)
      : reciprocal_(reciprocal) {
    std::vector<std::uint32_t> keys(logits.size());
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = key_of(logits[i]);
    if (row.top_k > 0 && row.top_k < static_cast<std::int64_t>(keys.size()))
      least_key_ =
          threshold(keys, static_cast<std::uint64_t>(row.top_k), [](std::size_t) { return 1u; });
    largest_ = -infinity;
    for (const float logit : logits) largest_ = std::fmax(largest_, logit);
    least_mass_ = mass_limit(row.min_p, std::uint64_t{1} << mass_bits);
    if (!(row.top_p < 1)) return;
    std::vector<std::uint64_t> masses(keys.size());
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < keys.size(); ++i)
      if (keys[i] >= least_key_) total += masses[i] = mass(logits[i]);
    const std::uint64_t limit = std::max<std::uint64_t>(1, mass_limit(row.top_p, total));
    least_key_ =
        std::max(least_key_, threshold(keys, limit, [&](std::size_t i) { return masses[i]; }));
  }

  bool keeps(float logit) const {
    return key_of(logit) >= least_key_ &&
           (least_mass_ == 0 || !(logit < largest_) || mass(logit) >= least_mass_);
  }

 private:
  std::uint64_t mass(float logit) const { return mass_of<float>(logit, largest_, reciprocal_); }

  float reciprocal_, largest_ = 0;
  std::uint32_t least_key_ = 0;
  std::uint64_t least_mass_ = 0;
};

class Choice {
 public:
  Choice(const Problem& problem, const HostCall& call)
      : form_(form_of(problem)),
        dtype_(problem.dtype),
        vocab_(problem.size("vocab")),
        rows_(problem.size("m")),
        call_(call),
        places_(sample_op().tensors(problem)) {}

  void run() const {
    choose();
    if (form_.best > 0)
      call_.parallel.run(static_cast<int>(rows_), call_.parallel.max_threads(),
                         [&](int row) { write_best(row); });
  }

 private:
  void choose() const {
    if (form_.filters) {
      call_.parallel.run(static_cast<int>(rows_), call_.parallel.max_threads(), [&](int row) {
        std::vector<float> logits(static_cast<std::size_t>(vocab_));
        load(row, 0, logits);
        const RowDraw own = draw_of(row);
        if (!own.draws()) return finish(row, best_of(own, logits, 0, keeps_all));
        const Filter filter(logits, own, reciprocal_temperature<float>(own.draw.temperature));
        finish(row, best_of(own, logits, 0, [&](float logit) { return filter.keeps(logit); }));
      });
      return;
    }
    const std::int64_t size = std::int64_t{1} << 13, parts = quotient_up(vocab_, size);
    std::vector<Best> best(static_cast<std::size_t>(rows_ * parts));
    call_.parallel.run(
        static_cast<int>(rows_ * parts), call_.parallel.max_threads(), [&](int task) {
          const std::int64_t row = task / parts, first = task % parts * size;
          std::vector<float> logits(static_cast<std::size_t>(std::min(size, vocab_ - first)));
          load(row, first, logits);
          best[static_cast<std::size_t>(task)] = best_of(draw_of(row), logits, first, keeps_all);
        });
    for (std::int64_t row = 0; row < rows_; ++row) {
      Best all;
      for (std::int64_t part = 0; part < parts; ++part)
        all.add(best[static_cast<std::size_t>(row * parts + part)]);
      finish(row, all);
    }
  }
  void write_best(std::int64_t row) const {
    std::vector<float> logits(static_cast<std::size_t>(vocab_));
    load(row, 0, logits);
    Best all;
    for (const float logit : logits) all.add_probability(logit);
    std::vector<std::int32_t> ids(logits.size());
    std::iota(ids.begin(), ids.end(), 0);
    const auto rank = [&](std::int32_t id) {
      return rank_of(logits[static_cast<std::size_t>(id)]);
    };
    std::partial_sort(ids.begin(), ids.begin() + form_.best, ids.end(),
                      [&](std::int32_t a, std::int32_t b) {
                        return rank(a) != rank(b) ? rank(a) > rank(b) : a < b;
                      });
    for (std::int64_t i = 0; i < form_.best; ++i) {
      const std::int32_t id = ids[static_cast<std::size_t>(i)];
      tensor<std::int32_t>("best_ids")[row * form_.best + i] = id;
      tensor<float>("best_logprobs")[row * form_.best + i] =
          logits[static_cast<std::size_t>(id)] - (all.largest + std::log(all.sum));
    }
  }

  static bool keeps_all(float) { return true; }

  template <typename Value>
  Value* tensor(const char* name) const {
    return static_cast<Value*>(address_of(call_, places_.at(name)));
  }
  template <typename Value>
  Value value_of(const char* name, std::int64_t row) const {
    return tensor<Value>(name)[row];
  }

  RowDraw draw_of(std::int64_t row) const {
    RowDraw own;
    if (!form_.draws) return own;
    own.draw = {value_of<float>("temperature", row), value_of<std::int64_t>("seeds", row),
                value_of<std::int32_t>("steps", row)};
    if (!form_.filters) return own;
    own.top_k = value_of<std::int32_t>("top_k", row);
    own.top_p = value_of<float>("top_p", row);
    own.min_p = value_of<float>("min_p", row);
    return own;
  }
  void load(std::int64_t row, std::int64_t first, std::vector<float>& logits) const {
    decode(dtype_,
           tensor<std::byte>("logits") +
               static_cast<std::size_t>(row * vocab_ + first) * dtype_bytes(dtype_),
           std::span<float>(logits));
    if (form_.softcap > 0)
      for (float& logit : logits) logit = capped<float>(logit, form_.softcap);
  }
  template <typename Keeps>
  Best best_of(const RowDraw& own, std::span<const float> logits, std::int64_t first,
               const Keeps& keeps) const {
    Best best;
    const score_factors by = factors_of_scores<float>(own.draw.temperature);
    random_words words{};  // of ids 4 * quad and the next three
    std::int64_t quad = -1;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const float logit = logits[i];
      if (form_.logprobs) best.add_probability(logit);
      const std::int64_t id = first + static_cast<std::int64_t>(i);
      if (!own.draws()) {
        best.add(logit, logit, id);
        continue;
      }
      if (!keeps(logit)) continue;
      if (id / 4 != quad) words = noise_words(own.draw.seed, own.draw.step, quad = id / 4);
      best.add(score_of<float>(logit, by, words.word[id % 4]), logit, id);
    }
    return best;
  }
  void finish(std::int64_t row, const Best& best) const {
    tensor<std::int32_t>("ids")[row] = static_cast<std::int32_t>(best.id);
    tensor<float>("logit")[row] = best.logit;
    if (form_.logprobs)
      tensor<float>("logprob")[row] = best.logit - (best.largest + std::log(best.sum));
  }

  Form form_;
  DType dtype_;
  std::int64_t vocab_, rows_;
  const HostCall& call_;
  TensorPlaces places_;
};

Program program(const Problem& problem, const DeviceFacts&, const Config&) {
  return host_program(sample_op().tensors(problem).size(),
                      [problem](const HostCall& call) { Choice(problem, call).run(); });
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const StageFamily family =
      cpu_fallback({.name = "cpu_choose",
                    .summary = "parts of rows on all threads",
                    .stage = sample::stage,
                    .sources = {"sample/cpu_families.cpp", "common/sampling.cuh"},
                    .program = program});
  return {&family};
}

}  // namespace fftune::sample
