#include "runtime/token_segments.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <string>
#include <utility>

namespace fftune {
namespace {

/// Choices this far apart have another between them: what serves from further away is called far.
constexpr std::int64_t most_apart = 4;

std::set<std::int64_t> chosen_tokens(const Op& op, const Problem& most, const DeviceFacts& facts,
                                     const PresetLibrary& presets) {
  const auto end = most.size(op.token_size());
  std::set<std::int64_t> tokens{1, end};
  for (const auto recorded : presets.recorded_tokens(most, facts, comparison_of(op)))
    if (recorded < end) tokens.insert(recorded);
  for (auto next = std::next(tokens.begin()); next != tokens.end(); ++next)
    for (auto between = *std::prev(next); between < *next / most_apart;) {
      between *= most_apart;
      tokens.insert(between);
    }
  return tokens;
}

/// Compares two recipes at token counts between those that they were chosen for.
class Crossing {
 public:
  Crossing(const Op& op, const Problem& layer, const DeviceFacts& facts, const TokenSegment& before,
           const TokenSegment& after)
      : op_(op), layer_(layer), facts_(facts), before_(before), after_(after) {}

  /// The least token count from which on the second serves.
  std::int64_t first_of_second() const {
    std::int64_t low = before_.chosen_at;  // the first serves here, the second at `high`
    std::int64_t high = after_.chosen_at;
    // Tiles fill waves of blocks, so the model may cross more than once: the last counts.
    constexpr int samples = 16;
    const double step =
        std::pow(static_cast<double>(high) / static_cast<double>(low), 1. / samples);
    for (int i = samples - 1; i > 0; --i) {
      const auto tokens = static_cast<std::int64_t>(
          std::llround(static_cast<double>(before_.chosen_at) * std::pow(step, i)));
      if (tokens <= low || tokens >= high) continue;
      if (second_serves(tokens)) {
        high = tokens;
        continue;
      }
      low = tokens;
      break;
    }
    while (high - low > 1) {
      const auto middle = low + (high - low) / 2;
      (second_serves(middle) ? high : low) = middle;
    }
    return high;
  }

 private:
  bool legal(const Problem& problem, const Recipe& recipe) const {
    return std::all_of(recipe.begin(), recipe.end(), [&](const Variant& variant) {
      return illegality(op_, problem, facts_, variant).empty();
    });
  }

  bool second_serves(std::int64_t tokens) const {
    const Problem problem = layer_.with_size(op_.token_size(), tokens);
    const bool second = legal(problem, after_.choice.recipe);
    if (!second || !legal(problem, before_.choice.recipe)) return second;
    const auto one = estimate_of(op_, problem, facts_, before_.choice.recipe);
    const auto other = estimate_of(op_, problem, facts_, after_.choice.recipe);
    if (one && other) return *other < *one;
    return static_cast<double>(tokens) * static_cast<double>(tokens) >=
           static_cast<double>(before_.chosen_at) * static_cast<double>(after_.chosen_at);
  }

  const Op& op_;
  const Problem& layer_;
  const DeviceFacts& facts_;
  const TokenSegment& before_;
  const TokenSegment& after_;
};

}  // namespace

std::vector<TokenSegment> token_segments(const Catalog& catalog, const Op& op, const Problem& most,
                                         const DeviceFacts& facts, const PresetLibrary& presets) {
  std::vector<TokenSegment> segments;
  for (const auto tokens : chosen_tokens(op, most, facts, presets)) {
    TokenSegment next{tokens, tokens, tokens,
                      choose(catalog, op, most.with_size(op.token_size(), tokens), facts, presets)};
    if (segments.empty()) {
      segments.push_back(std::move(next));
      continue;
    }
    auto& before = segments.back();
    if (next.choice.recipe == before.choice.recipe) {
      before.last = tokens;
      before.chosen_at = tokens;  // where the next crossing begins
      before.choice = std::move(next.choice);
      continue;
    }
    next.first = Crossing(op, most, facts, before, next).first_of_second();
    before.last = next.first - 1;
    segments.push_back(std::move(next));
  }
  return segments;
}

std::vector<std::int64_t> scanned_tokens(const TokenSegment& segment) {
  constexpr std::int64_t all_below = 8192, parts_of_octave = 128;
  std::vector<std::int64_t> tokens;
  for (auto count = segment.first; count <= segment.last;
       count += count < all_below ? 1 : count / parts_of_octave)
    tokens.push_back(count);
  if (tokens.back() != segment.last) tokens.push_back(segment.last);
  return tokens;
}

}  // namespace fftune
