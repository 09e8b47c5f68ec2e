#include "runtime/token_segments.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <utility>

namespace fftune {
namespace {

/// Choices this far apart have another between them: what serves from further away is called far.
constexpr std::int64_t most_apart = 4;

/// Constraints that cut finer than this are of single token counts.
constexpr std::size_t most_segments = 64;

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

/// Cuts the token counts into segments.
class Cutter {
 public:
  Cutter(const Catalog& catalog, const Op& op, Problem most, const DeviceFacts& facts,
         const PresetLibrary& presets)
      : catalog_(catalog), op_(op), most_(std::move(most)), facts_(facts), presets_(presets) {}

  std::vector<TokenSegment> segments() {
    for (const auto tokens : chosen_tokens(op_, most_, facts_, presets_))
      if (!append(chosen(tokens))) return single();
    std::vector<TokenSegment> whole;
    for (auto& segment : segments_)
      if (serves_throughout(segment))
        whole.push_back(std::move(segment));
      else if (!fill_holes(segment, whole))
        return single();
    return whole;
  }

 private:
  TokenSegment chosen(std::int64_t tokens) const {
    return {tokens, tokens, tokens, choose(catalog_, op_, problem(tokens), facts_, presets_)};
  }

  /// Cuts between the last segment and the next choice, above it; returns whether it could.
  bool append(TokenSegment next) {
    if (segments_.empty()) {
      segments_.push_back(std::move(next));
      return true;
    }
    const auto last_of_first =
        last_legal(segments_.back().choice.recipe, segments_.back().chosen_at, next.chosen_at);
    const auto first_of_second =
        first_legal(next.choice.recipe, segments_.back().chosen_at, next.chosen_at);
    if (last_of_first + 1 < first_of_second) {
      // Neither serves between them: what serves there just below the second goes first.
      return segments_.size() <= most_segments && append(chosen(first_of_second - 1)) &&
             append(std::move(next));
    }
    auto& before = segments_.back();
    if (next.choice.recipe == before.choice.recipe) {
      before.last = before.chosen_at = next.chosen_at;  // where the next cut begins
      before.choice = std::move(next.choice);
      return true;
    }
    next.first = cut(before, next, first_of_second, last_of_first + 1);
    before.last = next.first - 1;
    segments_.push_back(std::move(next));
    return true;
  }

  /// Where the second takes over, in [earliest, latest]. Tiles fill waves of blocks, so the model
  /// may cross more than once: the last crossing counts.
  std::int64_t cut(const TokenSegment& first, const TokenSegment& second, std::int64_t earliest,
                   std::int64_t latest) const {
    const auto second_is_faster = [&](std::int64_t tokens) {
      const auto one = estimate_of(op_, problem(tokens), facts_, first.choice.recipe);
      const auto other = estimate_of(op_, problem(tokens), facts_, second.choice.recipe);
      if (one && other) return *other < *one;
      return static_cast<double>(tokens) * static_cast<double>(tokens) >=
             static_cast<double>(first.chosen_at) * static_cast<double>(second.chosen_at);
    };
    std::int64_t low = earliest - 1;  // the first serves here, the second at `high`
    std::int64_t high = latest;
    constexpr int samples = 16;
    const double step =
        std::pow(static_cast<double>(latest) / static_cast<double>(earliest), 1. / samples);
    for (int i = samples - 1; i >= 0; --i) {
      const auto tokens = static_cast<std::int64_t>(
          std::llround(static_cast<double>(earliest) * std::pow(step, i)));
      if (tokens <= low || tokens >= high) continue;
      if (!second_is_faster(tokens)) {
        low = tokens;
        break;
      }
      high = tokens;
    }
    while (high - low > 1) {
      const auto middle = low + (high - low) / 2;
      (second_is_faster(middle) ? high : low) = middle;
    }
    return high;
  }

  /// The last below `end` that the recipe serves, as it does at `from`.
  std::int64_t last_legal(const Recipe& recipe, std::int64_t from, std::int64_t end) const {
    if (legal(recipe, end - 1)) return end - 1;
    std::int64_t low = from, high = end - 1;
    while (high - low > 1) {
      const auto middle = low + (high - low) / 2;
      (legal(recipe, middle) ? low : high) = middle;
    }
    return low;
  }

  /// The first above `begin` that the recipe serves, as it does at `until`.
  std::int64_t first_legal(const Recipe& recipe, std::int64_t begin, std::int64_t until) const {
    if (legal(recipe, begin + 1)) return begin + 1;
    std::int64_t low = begin + 1, high = until;
    while (high - low > 1) {
      const auto middle = low + (high - low) / 2;
      (legal(recipe, middle) ? high : low) = middle;
    }
    return high;
  }

  bool legal(const Recipe& recipe, std::int64_t tokens) const {
    return std::all_of(recipe.begin(), recipe.end(), [&](const Variant& variant) {
      return illegality(op_, problem(tokens), facts_, variant).empty();
    });
  }

  /// Asked at some token counts: a constraint that is not of a range, such as a divisor, shows at
  /// neighbours, and one that depends on how tiles fill waves, at wider distances.
  bool serves_throughout(const TokenSegment& segment) const {
    constexpr std::int64_t parts = 16;
    for (std::int64_t part = 0; part <= parts; ++part)
      for (const std::int64_t beside : {0, 1}) {
        const auto tokens = std::min(
            segment.first + (segment.last - segment.first) * part / parts + beside, segment.last);
        if (!legal(segment.choice.recipe, tokens)) return false;
      }
    return true;
  }

  /// Appends the segment in parts: where its choice does not serve, another one does. Returns
  /// whether the parts are few.
  bool fill_holes(const TokenSegment& segment, std::vector<TokenSegment>& whole) const {
    const TokenSegment* part = nullptr;
    for (auto tokens = segment.first; tokens <= segment.last; ++tokens) {
      const bool own = legal(segment.choice.recipe, tokens);
      if (part && (own ? part->choice.recipe == segment.choice.recipe
                       : legal(part->choice.recipe, tokens))) {
        whole.back().last = tokens;
        continue;
      }
      if (whole.size() > most_segments) return false;
      whole.push_back(own ? segment : chosen(tokens));
      whole.back().first = whole.back().last = tokens;
      part = &whole.back();
    }
    return true;
  }

  std::vector<TokenSegment> single() const {
    const auto end = most_.size(op_.token_size());
    std::vector<TokenSegment> all;
    const auto append_each = [&](std::int64_t first, std::int64_t last) {
      if (first > last) return;
      all.push_back({first, last, last, chosen(last).choice, true});
      all.back().choice.reason =
          fmt::format("variants of {} serve single numbers of {}: the op's default for each",
                      op_.name(), op_.token_size());
      all.back().choice.preset.reset();
      all.back().choice.recipe = default_recipe(op_, problem(last), facts_);
    };
    std::int64_t next = 1;
    for (const auto recorded : presets_.recorded_tokens(most_, facts_, comparison_of(op_))) {
      if (recorded > end) continue;
      append_each(next, recorded - 1);
      all.push_back(chosen(recorded));
      next = recorded + 1;
    }
    append_each(next, end);
    return all;
  }

  Problem problem(std::int64_t tokens) const { return most_.with_size(op_.token_size(), tokens); }

  const Catalog& catalog_;
  const Op& op_;
  const Problem most_;
  const DeviceFacts& facts_;
  const PresetLibrary& presets_;
  std::vector<TokenSegment> segments_;
};

}  // namespace

std::vector<TokenSegment> token_segments(const Catalog& catalog, const Op& op, const Problem& most,
                                         const DeviceFacts& facts, const PresetLibrary& presets) {
  return Cutter(catalog, op, unrepeated(op, most), facts, presets).segments();
}

Recipe recipe_at(const Op& op, const Problem& most, const DeviceFacts& facts,
                 const TokenSegment& segment, std::int64_t tokens) {
  const Problem problem = most.with_size(op.token_size(), tokens);
  const auto is_legal = [&](const Variant& variant) {
    return illegality(op, problem, facts, variant).empty();
  };
  const Recipe& chosen = segment.choice.recipe;
  if (!segment.each && std::all_of(chosen.begin(), chosen.end(), is_legal)) return chosen;
  return default_recipe(op, unrepeated(op, problem), facts);
}

std::vector<std::int64_t> scanned_tokens(const TokenSegment& segment) {
  constexpr std::int64_t all_below = 8192, parts_of_octave = 128;
  /// Among this many consecutive row lengths every alignment occurs.
  constexpr std::int64_t neighbours = 16;
  std::vector<std::int64_t> tokens;
  for (auto count = segment.first; count <= segment.last;
       count += count < all_below ? 1 : count / parts_of_octave) {
    const auto end = segment.each && count >= all_below ? count + neighbours : count + 1;
    for (auto each = count; each < end && each <= segment.last; ++each) tokens.push_back(each);
  }
  if (tokens.back() != segment.last) tokens.push_back(segment.last);
  return tokens;
}

}  // namespace fftune
