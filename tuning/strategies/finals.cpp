#include "tuning/strategies/finals.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fftune {
namespace {

/// Variants compiled at a time: several for every core.
constexpr std::size_t compile_batch = 128;
/// Where time is short: first this many, then as many as this part of the time compiles, so that
/// what was compiled is screened too.
constexpr std::size_t first_batch = 16;
constexpr double compile_share = 0.1;

/// A process that shares a device with one other takes twice as long, or a little more.
constexpr double suspect_band = 3;
constexpr std::size_t most_suspects = 256;

/// Samples of each finalist, and how many times as many again while some are not told apart.
constexpr int final_samples = 21;
constexpr int most_extensions = 2;

}  // namespace

std::vector<std::size_t> within(const Search& search, std::vector<std::size_t> indices, double band,
                                std::size_t count) {
  std::sort(indices.begin(), indices.end());
  std::stable_sort(indices.begin(), indices.end(), [&](std::size_t a, std::size_t b) {
    return search.median_us(a) < search.median_us(b);
  });
  if (indices.empty()) return indices;
  const double limit = search.median_us(indices.front()) * band;
  std::size_t kept = 0;
  while (kept < std::min(count, indices.size()) && std::isfinite(search.median_us(indices[kept])) &&
         search.median_us(indices[kept]) <= limit)
    ++kept;
  indices.resize(kept);
  return indices;
}

std::vector<std::size_t> affordable(const Search& search, std::vector<std::size_t> indices,
                                    double seconds) {
  double spent = 0;
  std::size_t kept = 0;
  while (kept < indices.size()) {
    spent += search.median_us(indices[kept]) * 1e-6;
    if (kept >= 3 && spent > seconds) break;
    ++kept;
  }
  indices.resize(kept);
  return indices;
}

std::vector<std::size_t> about_to_be_timed(const Search& search,
                                           const std::vector<std::size_t>& order) {
  std::vector<std::size_t> all;
  for (const auto index : order)
    if (index < search.warm_starts() || !std::isfinite(search.median_us(index)))
      all.push_back(index);
  return all;
}

void look_again(Search& search, const std::vector<std::size_t>& indices, double band) {
  const double best = search.best_us();
  // The first of several devices looks at all of them, and has to load the candidates that others
  // tried.
  auto suspects = within(search, indices, suspect_band, most_suspects / search.workers());
  std::erase_if(suspects,
                [&](std::size_t index) { return search.median_us(index) <= best * band; });
  const double seconds = std::min(search.seconds_left() * 0.1, 2.0);
  suspects = affordable(search, std::move(suspects), seconds / 2);
  if (search.stopped() || suspects.empty()) return;
  search.enter(Phase::semifinals, suspects.size());
  search.forget(suspects);
  search.measure(suspects, 1, seconds);
}

std::vector<std::size_t> finals(Search& search, const std::vector<std::size_t>& indices) {
  // Three times the tie band: a variant that noise put outside of it can come back in.
  const double seconds = std::min(search.seconds_left() * 0.7, 3.0);
  const auto finalists = affordable(search, within(search, indices, 1.06, 10), seconds / 5);
  if (search.stopped() || finalists.size() < 2) return finalists;
  search.enter(Phase::finals, finalists.size());
  search.forget(finalists);
  search.measure(finalists, final_samples, seconds);
  // More samples separate close candidates, up to a limit.
  for (int more = 0; more < most_extensions && search.undecided(finalists); ++more) {
    if (search.stopped()) break;
    search.measure(finalists, final_samples, std::min(search.seconds_left() * 0.3, 3.0));
  }
  return finalists;
}

std::vector<std::size_t> in_batches(Search& search, const std::vector<std::size_t>& order,
                                    double reserve, double band, int samples) {
  const double time = search.seconds_left();
  std::size_t size = std::isfinite(time) ? first_batch : compile_batch;
  const auto ended = [&](double kept) {
    return search.stopped() || search.enough() ||
           (std::isfinite(time) && search.seconds_left() < time * kept);
  };
  std::vector<std::size_t> reached;
  for (std::size_t begin = 0, end = 0; begin < order.size() && !ended(reserve); begin = end) {
    end = std::min(begin + size, order.size());
    const std::vector<std::size_t> batch(order.begin() + static_cast<std::ptrdiff_t>(begin),
                                         order.begin() + static_cast<std::ptrdiff_t>(end));
    search.enter(Phase::compile, order.size());
    const double before = search.seconds_left();
    search.compile(batch);
    if (std::isfinite(time)) {
      const double each =
          std::max(before - search.seconds_left(), 1e-6) / static_cast<double>(batch.size());
      size = static_cast<std::size_t>(std::clamp(search.seconds_left() * compile_share / each,
                                                 double{first_batch}, double{compile_batch}));
    }
    search.enter(Phase::screen, order.size());
    if (search.workers() > 1) {
      const auto screened = search.screen_all(batch, band, samples);
      reached.insert(reached.end(), screened.begin(), screened.end());
      continue;
    }
    // Compiled variants are worth a little more time than others.
    for (std::size_t i = begin; i < end && !ended(reserve / 2); ++i) {
      search.screen(order[i], search.best_us() * band);
      if (samples > 3) search.measure({order[i]}, samples, search.seconds_left());
      reached.push_back(order[i]);
    }
  }
  if (reached.size() < order.size()) search.cut_short();
  return reached;
}

std::vector<std::size_t> measure_fully(Search& search, const std::vector<std::size_t>& order,
                                       int samples) {
  return in_batches(search, order, 0.1, std::numeric_limits<double>::infinity(), samples);
}

}  // namespace fftune
