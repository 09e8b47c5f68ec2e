#include "tuning/decide.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string_view>
#include <tuple>

namespace fftune {
namespace {

double band_limit(const std::vector<Contestant>& contestants, double tie_band) {
  double best = std::numeric_limits<double>::infinity();
  for (const auto& contestant : contestants) best = std::min(best, contestant.median_us);
  return best * (1 + tie_band);
}

}  // namespace

std::vector<std::size_t> by_preference(const std::vector<Contestant>& contestants,
                                       double tie_band) {
  const double limit = band_limit(contestants, tie_band);
  std::vector<std::size_t> order(contestants.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto key = [&](std::size_t index) {
    const auto& contestant = contestants[index];
    const bool tie = contestant.median_us <= limit;
    return std::tuple(!tie, tie ? 0 : contestant.median_us, tie ? contestant.registers : 0,
                      std::string_view(contestant.id));
  };
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
  return order;
}

std::size_t tied(const std::vector<Contestant>& contestants, double tie_band) {
  const double limit = band_limit(contestants, tie_band);
  return static_cast<std::size_t>(
      std::count_if(contestants.begin(), contestants.end(),
                    [&](const Contestant& contestant) { return contestant.median_us <= limit; }));
}

}  // namespace fftune
