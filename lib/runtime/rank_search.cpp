#include "runtime/rank_search.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/hash.hpp"

namespace fftune {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr int passes = 4, samples = 5;
/// A candidate must be faster than the noise of samples.
constexpr double least_gain = 0.985;

class Ranks {
 public:
  Ranks(Backend& backend, const Group& group, const Op& op, const Problem& problem,
        const RankSearch& options)
      : backend_(backend), group_(group), op_(op), problem_(problem), options_(options) {
    const auto specs = op.tensors(problem);
    for (const TensorSpec& spec : specs) {
      if (spec.role == Role::intermediate) continue;
      buffers_.push_back(backend.allocate(spec.bytes()));
      addresses_.push_back(spec.name == "group" ? group.memory() : buffers_.back()->data());
      backend.fill(buffers_.back()->data(), 0, spec.bytes());
      if (!spec.draw || spec.name == "group") continue;
      std::vector<double> values(static_cast<std::size_t>(spec.elements()));
      spec.draw(1, values);
      std::vector<std::byte> bytes(spec.bytes());
      encode(spec.dtype, std::span<const double>(values), bytes.data());
      backend.write(buffers_.back()->data(), bytes.data(), bytes.size());
    }
  }

  /// Whether all ranks call it with the same text.
  bool all_have(const std::string& text) const {
    const auto number = static_cast<double>(fnv1a(text) >> 12);  // exact in a double
    // Both calls by every rank, whatever the first says.
    const double most = group_.largest(number), least = -group_.largest(-number);
    return most == least;
  }

  /// Seconds of the slowest rank; infinity where a rank cannot run the recipe.
  double seconds(const Recipe& recipe) const {
    std::optional<Plan> plan;
    try {
      plan.emplace(backend_, op_, problem_, recipe);
    } catch (const Error&) {
    }
    if (group_.largest(plan ? 0 : 1) > 0) return infinity;
    const auto workspace = backend_.allocate(std::max<std::size_t>(plan->workspace_bytes(), 256));
    backend_.fill(workspace->data(), 0, workspace->bytes());
    const auto run = [&](int, void* stream) {
      plan->run(addresses_.data(), workspace->data(), stream);
    };
    const auto replay = backend_.capture(passes, run);
    std::vector<double> times;
    for (int i = 0; i <= samples; ++i) times.push_back(replay->sample());
    group_.check();
    std::sort(times.begin() + 1, times.end());  // the first brings the ranks together
    return group_.largest(options_.clock(times[1 + samples / 2]));
  }

 private:
  Backend& backend_;
  const Group& group_;
  const Op& op_;
  const Problem& problem_;
  const RankSearch& options_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<void*> addresses_;
};

/// Variants of the stages that `now` covers, in an order that is the same on all ranks.
std::vector<Variant> others_of(const Op& op, const Problem& problem, const DeviceFacts& facts,
                               const Variant& now) {
  constexpr std::size_t most = 24;
  const auto stages = family_of(op, now.family).stages();
  std::vector<Variant> defaults, others;
  std::mt19937_64 random(1);
  for (const Family* family : op.families()) {
    if (family->device_kind() != facts.kind || family->stages() != stages ||
        family->refusal(problem, facts))
      continue;
    const auto add = [&](std::vector<Variant>& to, const Config& config) {
      Variant variant{std::string(family->name()), config};
      if (!(variant == now)) to.push_back(std::move(variant));
    };
    add(defaults, family->default_config(problem, facts));
    for (const Config& config : family->space(problem, facts).feasible()) add(others, config);
  }
  std::shuffle(others.begin(), others.end(), random);
  defaults.insert(defaults.end(), others.begin(), others.end());
  if (defaults.size() > most) defaults.resize(most);
  return defaults;
}

/// Recipes that cover stages by other families' spans: one in the place of several variants, and
/// the default without one that covers several. In an order that is the same on all ranks.
std::vector<Recipe> other_covers(const Op& op, const Problem& problem, const DeviceFacts& facts,
                                 const Recipe& now) {
  std::vector<Recipe> covers;
  const auto add = [&](Recipe recipe) {
    if (!recipe.empty() && recipe != now &&
        std::find(covers.begin(), covers.end(), recipe) == covers.end())
      covers.push_back(std::move(recipe));
  };
  for (std::size_t first = 0; first < now.size(); ++first) {
    auto stages = family_of(op, now[first].family).stages();
    if (stages.size() > 1) add(default_recipe_without(op, problem, facts, now[first].family));
    for (std::size_t last = first + 1; last < now.size(); ++last) {
      const auto more = family_of(op, now[last].family).stages();
      stages.insert(stages.end(), more.begin(), more.end());
      for (const Family* family : op.families()) {
        if (family->device_kind() != facts.kind || family->stages() != stages ||
            family->refusal(problem, facts))
          continue;
        Recipe recipe(now.begin(), now.begin() + static_cast<std::ptrdiff_t>(first));
        recipe.push_back({std::string(family->name()), family->default_config(problem, facts)});
        recipe.insert(recipe.end(), now.begin() + static_cast<std::ptrdiff_t>(last) + 1, now.end());
        add(std::move(recipe));
      }
    }
  }
  return covers;
}

}  // namespace

RankSearchResult search_on_ranks(Backend& backend, const Group& group, const Op& op,
                                 const Problem& problem, Recipe start, const RankSearch& options) {
  const auto begin = std::chrono::steady_clock::now();
  const Ranks ranks(backend, group, op, problem, options);
  // Ranks with other budgets would not end at the same candidate.
  if (!ranks.all_have(
          fmt::format("{} {} {}", problem.text(), recipe_text(start), options.budget.count())))
    throw Error(ErrorKind::invalid_input,
                "the ranks' problems, budgets, devices or presets differ: give all ranks the same");
  RankSearchResult result{.recipe = std::move(start)};
  result.before = result.after = ranks.seconds(result.recipe);
  const auto time_left = [&] {
    const auto spent = std::chrono::steady_clock::now() - begin;
    return group.largest(std::chrono::duration<double>(spent).count()) <=
           std::chrono::duration<double>(options.budget).count();
  };
  // Takes it where all ranks have it and it is faster; returns whether it did.
  const auto takes = [&](const Recipe& candidate) {
    if (!ranks.all_have(recipe_text(candidate))) return false;
    ++result.tried;
    const double seconds = ranks.seconds(candidate);
    if (seconds >= least_gain * result.after) return false;
    result.recipe = candidate;
    result.after = seconds;
    return true;
  };
  // First which families share the stages, until none of the covers nearby is faster.
  for (bool changes = true; changes;) {
    changes = false;
    for (const Recipe& cover : other_covers(op, problem, backend.facts(), result.recipe)) {
      if (!time_left()) return result;
      changes = takes(cover) || changes;
    }
  }
  std::vector<std::vector<Variant>> others;
  std::size_t longest = 0;
  for (const Variant& variant : result.recipe) {
    others.push_back(others_of(op, problem, backend.facts(), variant));
    longest = std::max(longest, others.back().size());
  }
  for (std::size_t round = 0; round < longest; ++round)
    for (std::size_t place = 0; place < result.recipe.size(); ++place) {
      if (round >= others[place].size()) continue;
      if (!time_left()) return result;
      Recipe candidate = result.recipe;
      candidate[place] = others[place][round];
      takes(candidate);
    }
  return result;
}

}  // namespace fftune
