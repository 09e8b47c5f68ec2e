// Successive halving (Karnin, Koren, Somekh 2013; Jamieson, Talwalkar 2016) for timings: most
// variants are so slow that one sample shows it, so the many are screened cheaply and the samples
// go to the few that are close. From the first cut on, variants are timed in turn, so that a clock
// that drifts moves all of them alike.
#include "tuning/strategies/strategy.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "tuning/strategies/finals.hpp"

namespace fftune {
namespace {

/// Screening ends when less than this part of the time is left.
constexpr double screening_reserve = 0.3;

struct Round {
  int samples;   // added to each
  double share;  // of the time left, at most
  double band;   // those within it of the best go on,
  double kept;   // and at most this part of them
};
constexpr std::array rounds{Round{2, 0.3, 1.25, 0.5}, Round{4, 0.3, 1.12, 0.5},
                            Round{8, 0.3, 1.06, 1.0}};
constexpr double longest_round_seconds = 4;

std::vector<std::size_t> screen(Search& search) {
  std::vector<double> estimates;
  for (std::size_t i = 0; i < search.variants().size(); ++i)
    estimates.push_back(search.predicted_us(i));
  const auto order = half_by_prediction(estimates, search.warm_starts(), search.seed());
  const auto fresh = about_to_be_timed(search, order);
  auto reached = in_batches(search, order, screening_reserve, screening_band);
  look_again(search, fresh, screening_band);
  return reached;
}

}  // namespace

std::vector<std::size_t> HalvingStrategy::run(Search& search) const {
  auto survivors = screen(search);
  survivors = within(search, survivors, screening_band, survivors.size());
  // The samples of the screening were taken minutes apart: they chose, they do not count.
  search.forget(survivors);
  for (const auto& round : rounds) {
    if (search.stopped() || survivors.size() < 2) break;
    const double seconds = std::min(search.seconds_left() * round.share, longest_round_seconds);
    survivors = affordable(search, std::move(survivors), seconds);
    search.enter(Phase::semifinals, survivors.size());
    search.measure(survivors, round.samples, seconds);
    const auto most = static_cast<double>(survivors.size()) * round.kept;
    survivors = within(search, survivors, round.band,
                       std::max<std::size_t>(static_cast<std::size_t>(std::ceil(most)), 10));
  }
  return finals(search, survivors);
}

}  // namespace fftune
