// Bayesian optimisation (Jones, Schonlau, Welch 1998; Snoek, Larochelle, Adams 2012) whose prior is
// what the families' models of the device expect, and then a descent: a model of few observations
// is most often wrong in the last percent, where a step in one parameter decides.
#include "tuning/strategies/strategy.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "tuning/strategies/finals.hpp"
#include "tuning/strategies/surrogate.hpp"

namespace fftune {
namespace {

/// Variants tried before anything is learned, as a part of all, and the part of them that should be
/// fast; the rest is from anywhere.
constexpr double first_part = 0.04;
constexpr double promising_part = 0.7;
constexpr std::size_t least_first = least_tried;
/// Variants tried between two fits of the model, as a part of all. Fewer are chosen better; more
/// fill the cores that compile them better.
constexpr double batch_part = 0.007;
constexpr std::size_t least_batch = 2;
/// So few leave most cores idle while they are compiled, and what is proposed now is likely to be
/// proposed again: this many are compiled at a time.
constexpr std::size_t compiled_ahead = 16;
/// Variants tried at most before the descent, as a part of all, if a gain of one percent counts;
/// with half the gain twice as many.
constexpr double most_part = 0.1;
constexpr double usual_gain = 0.01;
/// A neighbour that is faster by less may be so by noise.
constexpr double step = 0.003;
/// The model's proposals are tried until less than `descent_reserve` of the time is left, then
/// neighbours of the best until less than `final_reserve` is left: the descent begins however short
/// the time is.
constexpr double descent_reserve = 0.45;
constexpr double final_reserve = 0.2;

class Descent {
 public:
  explicit Descent(Search& search)
      : search_(search),
        estimates_(estimates_of(search)),
        surrogate_(search.variants(), estimates_, traits_of(search)),
        tried_(search.variants().size()),
        seconds_(search.seconds_left()) {}

  void run() {
    attempt(first(), final_reserve);
    while (!over()) {
      conclude();
      if (surrogate_.gain_expected() < search_.least_gain() || reached_.size() >= most_tried())
        break;
      const auto batch = std::max(part_of_all(batch_part, least_batch), search_.workers());
      auto proposed = surrogate_.propose(std::max(batch, compiled_ahead));
      search_.enter(Phase::compile, tried_.size());
      search_.compile(proposed);
      proposed.resize(std::min(batch, proposed.size()));
      if (!attempt(proposed, descent_reserve)) break;
    }
    // Until no neighbour of the best is faster by what noise does not explain, or none can gain
    // what counts.
    for (double before = 0; !over() && search_.best_us() != before &&
                            surrogate_.gain_likely() >= search_.least_gain();) {
      before = search_.best_us();
      attempt(neighbours_of_best(), final_reserve);
      conclude();
      if (search_.best_us() > before * (1 - step)) break;
    }
  }

  const std::vector<std::size_t>& reached() const { return reached_; }
  /// Those that were timed here, not known from a journal.
  const std::vector<std::size_t>& fresh() const { return fresh_; }

 private:
  static std::vector<double> estimates_of(const Search& search) {
    std::vector<double> all;
    for (std::size_t i = 0; i < search.variants().size(); ++i)
      all.push_back(search.predicted_us(i));
    return all;
  }

  static std::vector<std::vector<double>> traits_of(const Search& search) {
    std::vector<std::vector<double>> all;
    for (std::size_t i = 0; i < search.variants().size(); ++i) all.push_back(search.traits(i));
    return all;
  }

  std::size_t part_of_all(double part, std::size_t least) const {
    const auto all = static_cast<double>(tried_.size());
    return std::max(least, static_cast<std::size_t>(std::lround(part * all)));
  }

  std::size_t most_tried() const {
    const double part = most_part * usual_gain / std::max(search_.least_gain(), 1e-9);
    return part_of_all(std::min(part, 1.0), least_first);
  }

  void conclude() {
    surrogate_.conclude();
    search_.expect_gain(surrogate_.gain_likely());
  }

  bool over() const { return ended_ || reached_.empty() || reached_.size() == tried_.size(); }

  /// The warm starts, those of the lowest predicted time, and a random part.
  std::vector<std::size_t> first() const {
    const std::size_t wanted = part_of_all(first_part, least_first);
    const auto promising = static_cast<std::size_t>(promising_part * static_cast<double>(wanted));
    std::vector<std::size_t> order(tried_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin() + static_cast<std::ptrdiff_t>(search_.warm_starts()),
                     order.end(),
                     [&](std::size_t a, std::size_t b) { return estimates_[a] < estimates_[b]; });
    order.resize(std::min(order.size(), search_.warm_starts() + promising));
    for (const auto index : shuffled(tried_.size(), search_.warm_starts(), search_.seed())) {
      if (order.size() >= search_.warm_starts() + wanted) break;
      if (std::find(order.begin(), order.end(), index) == order.end()) order.push_back(index);
    }
    return order;
  }

  /// Those not tried that differ from the best in one parameter.
  std::vector<std::size_t> neighbours_of_best() const {
    const auto best = *std::min_element(
        reached_.begin(), reached_.end(),
        [&](std::size_t a, std::size_t b) { return search_.median_us(a) < search_.median_us(b); });
    const auto& variants = search_.variants();
    std::vector<std::size_t> near;
    for (std::size_t i = 0; i < variants.size(); ++i)
      if (!tried_[i] && differ_in_one(variants[i], variants[best])) near.push_back(i);
    return near;
  }

  static bool differ_in_one(const Variant& a, const Variant& b) {
    if (a.family != b.family) return false;
    const auto& one = a.config.entries();
    const auto& other = b.config.entries();
    int apart = 0;
    for (std::size_t d = 0; d < one.size(); ++d) apart += one[d].second != other[d].second;
    return apart == 1;
  }

  /// False if less than `kept` of the time was left, and nothing was tried.
  bool attempt(const std::vector<std::size_t>& indices, double kept) {
    if (std::isfinite(seconds_) && search_.seconds_left() < seconds_ * kept) {
      search_.cut_short();
      return false;
    }
    const auto fresh = about_to_be_timed(search_, indices);
    fresh_.insert(fresh_.end(), fresh.begin(), fresh.end());
    const auto tried = in_batches(search_, indices, 0, screening_band);
    for (const auto index : tried) {
      tried_[index] = true;
      reached_.push_back(index);
      const double us = search_.median_us(index);
      if (std::isfinite(us))
        surrogate_.learn(index, us);
      else
        surrogate_.drop(index);
    }
    ended_ = ended_ || tried.size() < indices.size();
    return true;
  }

  Search& search_;
  std::vector<double> estimates_;
  Surrogate surrogate_;
  std::vector<bool> tried_;
  std::vector<std::size_t> reached_;
  std::vector<std::size_t> fresh_;
  double seconds_;      // that there are for all of it
  bool ended_ = false;  // by the user or the budget
};

}  // namespace

std::vector<std::size_t> GuidedStrategy::run(Search& search) const {
  Descent descent(search);
  descent.run();
  look_again(search, descent.fresh(), 1.1);
  auto survivors = within(search, descent.reached(), 1.1, 32);
  // The samples of the screening were taken minutes apart: they chose, they do not count.
  search.forget(survivors);
  const double seconds = std::min(search.seconds_left() * 0.3, 4.0);
  survivors = affordable(search, std::move(survivors), seconds);
  search.enter(Phase::semifinals, survivors.size());
  search.measure(survivors, 5, seconds);
  return finals(search, survivors);
}

}  // namespace fftune
