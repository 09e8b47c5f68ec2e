#include "tuning/measure/ties.hpp"

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
  Ranking(const std::vector<Finalist>& finalists, double tie_band) {
    for (const auto& finalist : finalists)
      if (finalist.median_us < fastest_us_) {
        fastest_us_ = finalist.median_us;
        fastest_high_us_ = finalist.high_us;
      }
    limit_ = fastest_us_ * (1 + tie_band);
  }

  Rank of(const Finalist& finalist) const {
    if (finalist.median_us <= limit_) return Rank::within_band;
    const bool known = finalist.low_us > 0 && fastest_high_us_ > 0;
    return known && finalist.low_us <= fastest_high_us_ ? Rank::unresolved : Rank::slower;
  }

 private:
  double fastest_us_ = std::numeric_limits<double>::infinity();
  double fastest_high_us_ = 0;
  double limit_ = 0;
};

}  // namespace

std::vector<std::size_t> by_preference(const std::vector<Finalist>& finalists, double tie_band) {
  const Ranking ranking(finalists, tie_band);
  std::vector<std::size_t> order(finalists.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto key = [&](std::size_t index) {
    const auto& finalist = finalists[index];
    const auto rank = ranking.of(finalist);
    const bool tie = rank == Rank::within_band;
    return std::tuple(rank, tie ? 0 : finalist.median_us, tie ? finalist.registers : 0,
                      std::string_view(finalist.id));
  };
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
  return order;
}

TieSet tied(const std::vector<Finalist>& finalists, double tie_band) {
  const Ranking ranking(finalists, tie_band);
  TieSet ties;
  for (const auto& finalist : finalists) {
    const auto rank = ranking.of(finalist);
    ties.within_band += rank == Rank::within_band;
    ties.unresolved += rank == Rank::unresolved;
  }
  return ties;
}

}  // namespace fftune
