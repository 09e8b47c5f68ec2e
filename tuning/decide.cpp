#include "tuning/decide.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string_view>
#include <tuple>

namespace fftune {
namespace {

/// How far from the fastest.
enum class Rank { within_band, unresolved, slower };

class Ranking {
 public:
  Ranking(const std::vector<Contestant>& contestants, double tie_band) {
    for (const auto& contestant : contestants)
      if (contestant.median_us < fastest_us_) {
        fastest_us_ = contestant.median_us;
        fastest_high_us_ = contestant.high_us;
      }
    limit_ = fastest_us_ * (1 + tie_band);
  }

  Rank of(const Contestant& contestant) const {
    if (contestant.median_us <= limit_) return Rank::within_band;
    const bool known = contestant.low_us > 0 && fastest_high_us_ > 0;
    return known && contestant.low_us <= fastest_high_us_ ? Rank::unresolved : Rank::slower;
  }

 private:
  double fastest_us_ = std::numeric_limits<double>::infinity();
  double fastest_high_us_ = 0;
  double limit_ = 0;
};

}  // namespace

Contestant contestant(const Outcome& outcome) {
  return {outcome.id, outcome.median_us, outcome.registers, outcome.low_us, outcome.high_us};
}

std::vector<std::size_t> by_preference(const std::vector<Contestant>& contestants,
                                       double tie_band) {
  const Ranking ranking(contestants, tie_band);
  std::vector<std::size_t> order(contestants.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto key = [&](std::size_t index) {
    const auto& contestant = contestants[index];
    const auto rank = ranking.of(contestant);
    const bool tie = rank == Rank::within_band;
    return std::tuple(rank, tie ? 0 : contestant.median_us, tie ? contestant.registers : 0,
                      std::string_view(contestant.id));
  };
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
  return order;
}

TieSet tied(const std::vector<Contestant>& contestants, double tie_band) {
  const Ranking ranking(contestants, tie_band);
  TieSet ties;
  for (const auto& contestant : contestants) {
    const auto rank = ranking.of(contestant);
    ties.within_band += rank == Rank::within_band;
    ties.unresolved += rank == Rank::unresolved;
  }
  return ties;
}

}  // namespace fftune
