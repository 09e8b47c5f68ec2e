#include "tuning/strategies/order.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "tuning/measure/statistics.hpp"

namespace fftune {

std::vector<std::size_t> shuffled(std::size_t count, std::size_t fixed, std::uint64_t seed) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t end = count; end > fixed + 1; --end)
    std::swap(order[end - 1], order[fixed + next_random(seed) % (end - fixed)]);
  return order;
}

std::vector<std::size_t> half_by_prediction(const std::vector<double>& estimates, std::size_t fixed,
                                            std::uint64_t seed) {
  const auto anywhere = shuffled(estimates.size(), fixed, seed);
  auto ranked = anywhere;
  const auto rest = static_cast<std::ptrdiff_t>(std::min(fixed, estimates.size()));
  std::stable_sort(ranked.begin() + rest, ranked.end(),
                   [&](std::size_t a, std::size_t b) { return estimates[a] < estimates[b]; });
  std::vector<std::size_t> order(ranked.begin(), ranked.begin() + rest);
  std::vector<bool> taken(estimates.size(), false);
  for (auto place = static_cast<std::size_t>(rest); place < estimates.size(); ++place)
    for (const auto index : {ranked[place], anywhere[place]}) {
      if (taken[index]) continue;
      taken[index] = true;
      order.push_back(index);
    }
  return order;
}

}  // namespace fftune
