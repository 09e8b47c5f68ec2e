#include "ranks/rank_search.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "measure/statistics.hpp"
#include "ranks/lockstep.hpp"
#include "ranks/rank_record.hpp"
#include "store/preset_file.hpp"
#include "verify/host_threads.hpp"

namespace fftune {
namespace {

constexpr int samples = 5;
/// A candidate must be faster than the noise of samples.
constexpr double least_gain = 0.985;

struct Others {
  std::vector<Variant> variants;  // in an order that is the same on all ranks
  int feasible = 0;               // how many there are, those left out included
};

/// Variants of the stages that `now` covers: families' defaults, then those that the families'
/// models say are fast, in turns with any others.
Others others_of(const Op& op, const Problem& problem, const DeviceFacts& facts,
                 const Variant& now) {
  constexpr std::size_t most = 24;
  const auto stages = family_of(op, now.family).stages();
  std::vector<Variant> defaults, others;
  std::vector<std::pair<double, Variant>> modelled;
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
    for (const Config& config : family->space(problem, facts).feasible()) {
      add(others, config);
      if (const auto seconds = family->estimate(problem, facts, config))
        modelled.push_back({*seconds, {std::string(family->name()), config}});
    }
  }
  const auto feasible = static_cast<int>(defaults.size() + others.size()) + 1;
  std::shuffle(others.begin(), others.end(), random);
  std::stable_sort(modelled.begin(), modelled.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  modelled.resize(std::min(modelled.size(), most));
  for (std::size_t i = 0; i < modelled.size(); ++i)
    others.insert(others.begin() + static_cast<std::ptrdiff_t>(std::min(2 * i, others.size())),
                  std::move(modelled[i].second));
  for (Variant& variant : others) {
    if (defaults.size() >= most) break;
    if (variant != now && std::find(defaults.begin(), defaults.end(), variant) == defaults.end())
      defaults.push_back(std::move(variant));
  }
  return {std::move(defaults), feasible};
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

/// One search: the recipe so far, and the candidates that take its place.
class RankSearcher {
 public:
  RankSearcher(Lockstep& ranks, const RankSearch& options)
      : ranks_(ranks), options_(options), begin_(std::chrono::steady_clock::now()) {}

  RankSearchResult run(Recipe start, const std::vector<Recipe>& present) {
    result_.recipe = std::move(start);
    const auto plan = ranks_.plan(result_.recipe);
    if (!plan) refuse("a rank cannot run it");
    if (const auto wrong = ranks_.verify(plan->executables()); !wrong.passed) refuse(wrong.failure);
    ranks_.compute_intermediates(*plan);
    result_.before = result_.after = seconds(*plan, std::numeric_limits<double>::infinity());
    for (const Recipe& recipe : present)
      if (recipe != result_.recipe) takes(recipe);
    result_.complete = search_covers() && search_variants();
    return std::move(result_);
  }

  /// Counts for each variant of the recipe.
  const std::vector<StageCounts>& counts() const { return counts_; }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw Error(ErrorKind::unavailable, fmt::format("{} by {}: {}", ranks_.problem().text(),
                                                    recipe_text(result_.recipe), why));
  }

  double seconds(const Plan& plan, double give_up) {
    return median(ranks_.time({plan.executables()}, samples, give_up).front());
  }

  bool within_budget() const {
    const auto spent = std::chrono::steady_clock::now() - begin_;
    return ranks_.group().largest(std::chrono::duration<double>(spent).count()) <=
           std::chrono::duration<double>(options_.budget).count();
  }

  /// Where the recipe that it began with took all of the budget, one candidate is tried yet.
  bool time_left() const { return result_.tried == 0 || within_budget(); }

  /// Takes it where all ranks have it, it is faster, and its results are right.
  bool takes(const Recipe& candidate) {
    if (!ranks_.all_have(recipe_text(candidate))) return false;
    ++result_.tried;
    const auto plan = ranks_.plan(candidate);
    const double time = plan ? seconds(*plan, result_.after) : 0;
    if (plan && time >= least_gain * result_.after) return false;
    if (!plan || !ranks_.verify(plan->executables()).passed) {
      ++result_.failed;
      return false;
    }
    result_.recipe = candidate;
    result_.after = time;
    return true;
  }

  /// Which families share the stages, until none of the covers nearby is faster. False: no time.
  bool search_covers() {
    for (bool changes = true; changes;) {
      changes = false;
      const auto covers =
          other_covers(ranks_.op(), ranks_.problem(), ranks_.facts(), result_.recipe);
      std::vector<Variant> variants;
      for (const Recipe& cover : covers)
        for (const Variant& variant : cover)
          if (std::find(variants.begin(), variants.end(), variant) == variants.end())
            variants.push_back(variant);
      compile(variants);
      for (const Recipe& cover : covers) {
        if (!time_left()) return false;
        changes = takes(cover) || changes;
      }
    }
    return true;
  }

  /// Other variants of the same stages, one of each place in turn. False: no time.
  bool search_variants() {
    std::vector<Others> others;
    std::size_t longest = 0;
    for (const Variant& variant : result_.recipe) {
      others.push_back(others_of(ranks_.op(), ranks_.problem(), ranks_.facts(), variant));
      longest = std::max(longest, others.back().variants.size());
      counts_.push_back({.feasible = others.back().feasible, .measured = 1});
    }
    for (std::size_t round = 0; round < longest; ++round) {
      if (!time_left()) return false;
      if (round % rounds_compiled == 0) {
        std::vector<Variant> next;
        for (const Others& place : others)
          for (std::size_t i = round; i < std::min(round + rounds_compiled, place.variants.size());
               ++i)
            next.push_back(place.variants[i]);
        compile(next);
      }
      for (std::size_t place = 0; place < others.size(); ++place) {
        if (round >= others[place].variants.size()) continue;
        if (!time_left()) return false;
        Recipe candidate = result_.recipe;
        candidate[place] = others[place].variants[round];
        const int failed = result_.failed;
        takes(candidate);
        ++(result_.failed > failed ? counts_[place].failed : counts_[place].measured);
      }
    }
    return true;
  }

  /// Compiles them side by side, which takes longer than their runs: the backend keeps the kernels.
  /// One that fails does so again when its turn comes. Without time only the next one has a turn.
  void compile(const std::vector<Variant>& variants) const {
    if (ranks_.facts().kind == DeviceKind::cpu || !within_budget()) return;
    const auto count = static_cast<int>(variants.size());
    HostThreads().run(count, count, [&](int i) {
      const Variant& variant = variants[static_cast<std::size_t>(i)];
      try {
        ranks_.backend().compile(family_of(ranks_.op(), variant.family)
                                     .program(ranks_.problem(), ranks_.facts(), variant.config));
      } catch (const Error&) {
      }
    });
  }

  static constexpr std::size_t rounds_compiled = 2;
  Lockstep& ranks_;
  const RankSearch& options_;
  std::chrono::steady_clock::time_point begin_;
  RankSearchResult result_;
  std::vector<StageCounts> counts_;
};

/// For another process's lock; the peers wait for rank 0 meanwhile.
const LockWait lock_wait{.most_seconds = 20};

/// Before the search: rank 0 finds what would stop the write behind it.
void require_writable(const Lockstep& ranks, const std::filesystem::path& presets) {
  ranks.on_all("write its presets", [&] {
    if (ranks.group().rank() == 0)
      require_mergeable(presets, preset_device(ranks.facts()), std::string(ranks.op().name()),
                        lock_wait);
  });
}

/// The recipe of the record in rank 0's presets, on all ranks; empty if there is none.
Recipe recorded(const Lockstep& ranks, const std::filesystem::path& presets) {
  std::string ids;
  ranks.on_all("read its presets", [&] {
    if (ranks.group().rank() != 0) return;
    const auto path =
        preset_path(presets, preset_device(ranks.facts()).slug, std::string(ranks.op().name()));
    if (!std::filesystem::exists(path)) return;
    const Comparison comparison = comparison_of(ranks.op());
    const auto records = by_compared_part(read_preset_file(path).records, comparison);
    const auto found = records.find(compared_part(ranks.problem(), comparison));
    if (found == records.end()) return;
    for (const Variant& variant : found->second.recipe()) ids += variant.id() + '\n';
  });
  Recipe recipe;
  std::istringstream lines(ranks.of_rank_0(ids));
  for (std::string id; std::getline(lines, id);) recipe.push_back(Variant::parse(id));
  return completed(ranks.op(), ranks.problem(), ranks.facts(), std::move(recipe));
}

void write(const Lockstep& ranks, const std::filesystem::path& presets,
           const PresetRecord& record) {
  ranks.on_all("write its presets", [&] {
    if (ranks.group().rank() == 0)
      merge_preset_records(presets, preset_device(ranks.facts()), record.problem.op, {record},
                           lock_wait, comparison_of(ranks.op()));
  });
}

}  // namespace

RankSearchResult search_on_ranks(Backend& backend, const Group& group, const Catalog& catalog,
                                 const Op& op, const Problem& problem, const Recipe& start,
                                 const RankSearch& options) {
  const bool writes = !options.presets.empty();
  Lockstep ranks(backend, group, op, problem, options.clock);
  // Ranks with other budgets would not end at the same candidate.
  if (!ranks.all_have(fmt::format("{} {} {} {}", problem.text(), recipe_text(start),
                                  options.budget.count(), writes)))
    throw Error(ErrorKind::invalid_input,
                "the ranks' problems, budgets, devices or presets differ: give all ranks the same");
  // A record is one device's.
  if (writes && !ranks.all_have(backend.facts().name))
    throw Error(
        ErrorKind::invalid_input,
        fmt::format("this rank is on {} and others on another device: a record is for equal "
                    "devices; search without a folder of presets",
                    backend.facts().name));
  std::vector<Recipe> present = options.present;
  std::string texts;
  for (const Recipe& recipe : present) texts += recipe_text(recipe) + '\n';
  if (!ranks.all_have(texts)) present.clear();
  if (writes) {
    require_writable(ranks, options.presets);
    if (auto recipe = recorded(ranks, options.presets); !recipe.empty())
      present.push_back(std::move(recipe));
  }
  RankSearcher searcher(ranks, options);
  RankSearchResult result = searcher.run(start, present);
  if (!writes) return result;
  present.push_back(start);
  result.record = record_on_ranks(ranks, catalog, result, present, searcher.counts());
  result.recipe = result.record->recipe();
  write(ranks, options.presets, *result.record);
  return result;
}

}  // namespace fftune
