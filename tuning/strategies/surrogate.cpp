#include "tuning/strategies/surrogate.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <utility>

namespace fftune {
namespace {

/// The scales are looked at again when this many times as much is known.
constexpr double news = 1.25;
/// With more observations than this, only the best and an even choice of the others are used,
/// because the cost grows with the cube.
constexpr std::size_t most_known = 256;
/// A parameter's own effect is correlated over about half of its values.
constexpr double own_reach = 0.5;
/// How many times what the most promising variant is expected to gain is still likely, and how many
/// times a time's error: chosen on the recorded landscapes, where it holds at the end of every
/// search (docs/measurements/strategies.md).
constexpr double caution = 2;

/// Words have no order, so two that differ are as far apart as the values of a number get.
double distance_of(bool word, double a, double b) {
  return word ? (a == b ? 0.0 : 1.0) : std::abs(a - b);
}

/// Parameters double more often than they are added to.
double scale_of(std::int64_t value) {
  return value > 0 ? 1 + std::log2(static_cast<double>(value)) : static_cast<double>(value);
}

}  // namespace

Surrogate::Surrogate(const std::vector<Variant>& variants, const std::vector<double>& estimates,
                     const std::vector<std::vector<double>>& traits)
    : points_(variants.size()), open_(variants.size(), true), process_({}, 0) {
  struct Range {
    double least = std::numeric_limits<double>::infinity();
    double most = -std::numeric_limits<double>::infinity();
    std::vector<std::string> words{};
    void include(double value) {
      least = std::min(least, value);
      most = std::max(most, value);
    }
    void include(const ParameterValue& value) {
      if (!value.is_word())
        include(scale_of(value.number()));
      else if (std::find(words.begin(), words.end(), value.word()) == words.end())
        words.push_back(value.word());
    }
    double place_of(const ParameterValue& value) const {
      if (value.is_word())
        return static_cast<double>(std::find(words.begin(), words.end(), value.word()) -
                                   words.begin());
      return most > least ? (scale_of(value.number()) - least) / (most - least) : 0;
    }
  };
  std::vector<Range> trait_ranges(traits.empty() ? 0 : traits.front().size());
  for (const auto& each : traits)
    for (std::size_t t = 0; t < each.size(); ++t) trait_ranges[t].include(each[t]);
  std::map<std::string, std::pair<std::size_t, std::vector<Range>>> families;
  for (const auto& variant : variants) {
    auto& ranges = families[variant.family].second;
    ranges.resize(variant.config.entries().size());
    for (std::size_t d = 0; d < ranges.size(); ++d)
      ranges[d].include(variant.config.entries()[d].second);
  }
  std::size_t parameters = 0;
  for (auto& [name, family] : families) {
    family.first = parameters;
    parameters += family.second.size();
    for (const auto& range : family.second) words_.push_back(!range.words.empty());
  }
  double sum = 0, squares = 0;
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const auto& [first, ranges] = families.at(variants[i].family);
    auto& point = points_[i];
    point.family = static_cast<std::size_t>(
        std::distance(families.begin(), families.find(variants[i].family)));
    point.first = first;
    for (std::size_t d = 0; d < ranges.size(); ++d)
      point.values.push_back(ranges[d].place_of(variants[i].config.entries()[d].second));
    for (std::size_t t = 0; t < traits[i].size(); ++t) {
      const double width = trait_ranges[t].most - trait_ranges[t].least;
      point.traits.push_back(width > 0 ? (traits[i][t] - trait_ranges[t].least) / width : 0);
    }
    point.estimate = std::log(estimates[i]);
    sum += point.estimate;
    squares += point.estimate * point.estimate;
  }
  const auto count = static_cast<double>(std::max<std::size_t>(variants.size(), 1));
  const double mean = sum / count;
  const double deviation = std::sqrt(std::max(squares / count - mean * mean, 0.0));
  for (auto& point : points_)
    point.estimate = deviation > 1e-9 ? (point.estimate - mean) / deviation : 0;
  scales_.traits.assign(trait_ranges.size(), 0.1);
  scales_.alone.assign(parameters, 0.1);
}

GaussianProcess::Covariance Surrogate::covariance(const Scales& scales) const {
  return [this, scales](std::size_t i, std::size_t j) {
    const auto& a = points_[i];
    const auto& b = points_[j];
    // All share an unknown level.
    double sum = 1 + scales.estimate * scales.estimate * a.estimate * b.estimate;
    for (std::size_t t = 0; t < a.traits.size(); ++t)
      sum += scales.traits[t] * scales.traits[t] *
             std::exp(-std::abs(a.traits[t] - b.traits[t]) / own_reach);
    if (a.family != b.family) return sum;
    double distance = 0;
    for (std::size_t d = 0; d < a.values.size(); ++d) {
      const double apart = distance_of(words_[a.first + d], a.values[d], b.values[d]);
      const double alone = scales.alone[a.first + d];
      distance += apart;
      sum += alone * alone * std::exp(-apart / own_reach);
    }
    return sum + scales.family * scales.family +
           scales.together * scales.together * std::exp(-distance / scales.reach);
  };
}

void Surrogate::learn(std::size_t variant, double us) {
  known_[variant] = std::log(us);
  open_[variant] = false;
}

void Surrogate::drop(std::size_t variant) {
  open_[variant] = false;
}

GaussianProcess Surrogate::process(const Scales& scales) const {
  std::vector<std::pair<double, std::size_t>> order;
  for (const auto& [variant, value] : known_) order.emplace_back(value, variant);
  std::sort(order.begin(), order.end());
  GaussianProcess process(covariance(scales), scales.noise);
  const std::size_t kept = order.size() > most_known ? most_known / 2 : order.size();
  for (std::size_t i = 0; i < kept; ++i) process.observe(order[i].second, order[i].first - mean_);
  const auto rest = static_cast<double>(order.size() - kept);
  for (std::size_t i = kept; i < std::min(order.size(), most_known); ++i) {
    const auto at = static_cast<std::size_t>(static_cast<double>(i - kept) * rest /
                                             static_cast<double>(most_known - kept));
    process.observe(order[kept + at].second, order[kept + at].first - mean_);
  }
  return process;
}

double Surrogate::merit(const Scales& scales) const {
  // Nothing is known of a scale but its size, about.
  static const Scales usual;
  const auto ordinary = [](double value, double expected) {
    const double apart = std::log(value / expected);
    return -apart * apart / 2;
  };
  double sum = process(scales).log_likelihood() + ordinary(scales.estimate, usual.estimate) +
               ordinary(scales.family, usual.family) + ordinary(scales.together, usual.together) +
               ordinary(scales.reach, usual.reach) + 4 * ordinary(scales.noise, usual.noise);
  for (const double alone : scales.alone) sum += ordinary(alone, 0.1);
  for (const double trait : scales.traits) sum += ordinary(trait, 0.1);
  return sum;
}

void Surrogate::improve_scales() {
  double best = merit(scales_);
  const auto improve = [&](double& scale) {
    for (const double factor : {2.0, 0.5}) {
      const double before = scale;
      scale = before * factor;
      const double merit = this->merit(scales_);
      if (merit > best) {
        best = merit;
        return;
      }
      scale = before;
    }
  };
  for (int turn = 0; turn < 2; ++turn) {
    for (double* scale :
         {&scales_.estimate, &scales_.family, &scales_.together, &scales_.reach, &scales_.noise})
      improve(*scale);
    for (double& alone : scales_.alone) improve(alone);
    for (double& trait : scales_.traits) improve(trait);
  }
}

void Surrogate::conclude() {
  mean_ = 0;
  best_ = known_.empty() ? 0 : std::numeric_limits<double>::infinity();
  for (const auto& [variant, value] : known_) {
    mean_ += value / static_cast<double>(known_.size());
    best_ = std::min(best_, value);
  }
  if (static_cast<double>(known_.size()) >= news * static_cast<double>(scaled_at_)) {
    scaled_at_ = known_.size();
    improve_scales();
  }
  process_ = process(scales_);
  std::vector<std::size_t> open;
  for (std::size_t i = 0; i < open_.size(); ++i)
    if (open_[i]) open.push_back(i);
  process_.watch(std::move(open));
}

std::vector<std::size_t> Surrogate::propose(std::size_t count) {
  std::vector<std::size_t> chosen;
  GaussianProcess imagined = process_;
  const auto& watched = imagined.watched();
  std::set<std::size_t> taken;
  while (chosen.size() < std::min(count, watched.size())) {
    std::size_t best = watched.size();
    double most = -1;
    for (std::size_t i = 0; i < watched.size(); ++i) {
      const double gain = expected_gain(imagined.belief(i), best_ - mean_);
      if (gain > most && !taken.contains(i)) {
        most = gain;
        best = i;
      }
    }
    taken.insert(best);
    chosen.push_back(watched[best]);
    imagined.observe(watched[best], imagined.belief(best).mean);
  }
  return chosen;
}

double Surrogate::gain_expected() const {
  double sum = 0;
  for (std::size_t i = 0; i < process_.watched().size(); ++i)
    sum += expected_gain(process_.belief(i), best_ - mean_);
  return 1 - std::exp(-sum);
}

double Surrogate::gain_likely() const {
  double most = 0;
  for (std::size_t i = 0; i < process_.watched().size(); ++i)
    most = std::max(most, expected_gain(process_.belief(i), best_ - mean_));
  // Whoever is sure that nothing is left still knows the best no better than a time can be known.
  return std::min(1 - std::exp(-caution * most), gain_expected()) + caution * scales_.noise;
}

}  // namespace fftune
