// Ranks as processes: this program, started once for each rank with what it has to do in
// FFTUNE_TEST_RANK: "rank ranks name device work".
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <tuple>

#include "all_reduce/problems.hpp"
#include "core/error.hpp"
#include "core/hash.hpp"
#include "cpu/open.hpp"
#include "ranks/rank_search.hpp"
#include "runtime/choice.hpp"
#include "runtime/group.hpp"
#include "runtime/plan.hpp"
#include "store/preset_file.hpp"
#include "support/error_of.hpp"
#include "support/on_threads.hpp"
#include "support/temporary_folder.hpp"
#include "support/verify_variants.hpp"

extern char** environ;

using namespace fftune;
using namespace fftune::test;

namespace {

struct Task {
  int rank = 0, ranks = 0;
  std::string name, device, work;
};

std::unique_ptr<Backend> open(const Task& task) {
  if (task.device == "cpu") return open_cpu();
  const Environment environment = read_environment();
  // "cuda:0", or "cuda": a GPU for each rank.
  const std::string spec = task.device == "cuda" ? fmt::format("cuda:{}", task.rank) : task.device;
  return open_device(spec, *builtin_catalog().sources, environment);
}

/// A rank's tensors of one problem, on its device.
class RankRun {
 public:
  RankRun(Backend& backend, const Task& task, void* group, const Problem& problem)
      : backend_(&backend),
        task_(task),
        problem_(problem),
        specs_(all_reduce_op().tensors(problem)) {
    for (const auto& spec : specs_) {
      buffers_.push_back(backend.allocate(spec.bytes() + 256));
      addresses_.push_back(spec.name == "group" ? group : buffers_.back()->data());
    }
  }

  /// Runs the variant on the inputs of a seed; returns what is wrong with the results, or nothing.
  std::string check(const Plan& plan, std::uint64_t seed) {
    const auto form = all_reduce::form_of(problem_);
    for (std::size_t i = 0; i < specs_.size(); ++i)
      if (specs_[i].role == Role::output)
        backend_->fill(addresses_[i], 0xff, specs_[i].bytes());
      else if (specs_[i].name != "group")
        write(i, bytes_of(specs_[i].name == "x" ? seed + static_cast<std::uint64_t>(task_.rank)
                                                : seed + 100 + i,
                          specs_[i]));
    backend_->synchronize();
    run(plan, backend_->stream());
    backend_->synchronize();
    const bool rounds_sum = plan.recipe().front().id().find("shots=2") != std::string::npos;
    const auto expected = sums(form, seed, rounds_sum);
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      if (specs_[i].role != Role::output) continue;
      std::vector<std::byte> bytes(specs_[i].bytes());
      backend_->read(bytes.data(), addresses_[i], bytes.size());
      if (specs_[i].name == "sum" || !form.normalises) {
        if (bytes != expected) return fmt::format("{}: other bits", specs_[i].name);
        continue;
      }
      std::vector<float> got(static_cast<std::size_t>(specs_[i].elements()));
      decode(form.dtype, bytes.data(), std::span<float>(got));
      if (const auto wrong = norm_error(form, seed, expected, got); !wrong.empty()) return wrong;
    }
    return "";
  }

  /// Runs it on x of ones alone, which are NaNs on all ranks; returns whether all of y is NaN.
  bool keeps_nans(const Plan& plan) {
    backend_->fill(addresses_[0], 0xff, specs_[0].bytes());
    const std::size_t y = tensor_index(specs_, "y");
    backend_->fill(addresses_[y], 0, specs_[y].bytes());
    backend_->synchronize();
    run(plan, backend_->stream());
    backend_->synchronize();
    std::vector<std::byte> bytes(specs_[y].bytes());
    backend_->read(bytes.data(), addresses_[y], bytes.size());
    std::vector<float> got(static_cast<std::size_t>(specs_[y].elements()));
    decode(specs_[y].dtype, bytes.data(), std::span<float>(got));
    return std::all_of(got.begin(), got.end(), [](float value) { return std::isnan(value); });
  }

  void run(const Plan& plan, void* stream) const { plan.run(addresses_.data(), nullptr, stream); }

 private:
  static std::vector<std::byte> bytes_of(std::uint64_t seed, const TensorSpec& spec) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<std::size_t>(spec.elements()));
    for (float& value : values) value = normal(random);
    std::vector<std::byte> bytes(spec.bytes());
    encode(spec.dtype, std::span<const float>(values), bytes.data());
    return bytes;
  }
  std::vector<float> floats_of(std::uint64_t seed, const TensorSpec& spec) const {
    std::vector<float> values(static_cast<std::size_t>(spec.elements()));
    decode(spec.dtype, bytes_of(seed, spec).data(), std::span<float>(values));
    return values;
  }
  void write(std::size_t i, const std::vector<std::byte>& bytes) {
    backend_->write(addresses_[i], bytes.data(), bytes.size());
  }

  /// In rank order, in float, rounded to the dtype.
  std::vector<std::byte> sums(const all_reduce::Form& form, std::uint64_t seed,
                              bool rounds_sum) const {
    auto total = floats_of(seed, specs_[0]);
    for (int rank = 1; rank < form.ranks; ++rank) {
      const auto other = floats_of(seed + static_cast<std::uint64_t>(rank), specs_[0]);
      for (std::size_t i = 0; i < total.size(); ++i) total[i] += other[i];
    }
    std::vector<std::byte> bytes(specs_[0].bytes());
    if (rounds_sum) {
      encode(form.dtype, std::span<const float>(total), bytes.data());
      decode(form.dtype, bytes.data(), std::span<float>(total));
    }
    if (form.adds) {
      const auto other = floats_of(seed + 101, specs_[1]);
      for (std::size_t i = 0; i < total.size(); ++i) total[i] += other[i];
    }
    encode(form.dtype, std::span<const float>(total), bytes.data());
    return bytes;
  }

  std::string norm_error(const all_reduce::Form& form, std::uint64_t seed,
                         const std::vector<std::byte>& sum, const std::vector<float>& got) const {
    std::vector<float> x(got.size());
    decode(form.dtype, sum.data(), std::span<float>(x));
    const std::size_t place = tensor_index(specs_, "w");
    const auto w = floats_of(seed + 100 + place, specs_[place]);
    const double tolerance = 4 * dtype_unit_roundoff(form.dtype) + 1e-5;
    for (std::size_t row = 0; row < static_cast<std::size_t>(form.m); ++row) {
      double squares = 0;
      for (std::size_t i = 0; i < w.size(); ++i)
        squares += double{x[row * w.size() + i]} * x[row * w.size() + i];
      const double r = 1 / std::sqrt(squares / static_cast<double>(w.size()) + double{form.eps});
      for (std::size_t i = 0; i < w.size(); ++i) {
        const double expected = x[row * w.size() + i] * r * double{w[i]};
        const double value = got[row * w.size() + i];
        if (!(std::abs(value - expected) <= tolerance * (std::abs(expected) + 1e-3)))
          return fmt::format("y[{}, {}] is {} instead of {}", row, i, value, expected);
      }
    }
    return "";
  }

  Backend* backend_;
  Task task_;
  Problem problem_;
  std::vector<TensorSpec> specs_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<void*> addresses_;
};

Problem peers(const Backend& backend, const Task& task, DType dtype, std::int64_t m, std::int64_t d,
              const std::string& norm, const std::string& residual) {
  return all_reduce_problem(backend.facts().kind, dtype, task.ranks, m, d,
                            {{"norm", norm}, {"residual", residual}, {"link", "peers"}});
}

Plan plan_of(Backend& backend, const Problem& problem, const DrawnVariant& variant) {
  return Plan(backend, all_reduce_op(), problem,
              Recipe{Variant{std::string(variant.family->name()), variant.config}});
}

/// Every family at these sizes; each configuration three times, for both halves of the memory.
void verify_all(const Task& task,
                const std::vector<std::pair<std::int64_t, std::int64_t>>& sizes = {
                    {1, 4096}, {3, 65}, {37, 264}, {150, 1024}, {5, 32768}}) {
  const auto backend = open(task);
  Group group(*backend, {task.name, task.rank, task.ranks, std::uint64_t{2} << 20});
  std::mt19937_64 random(7);  // the same on all ranks
  const bool gpu = backend->facts().kind == DeviceKind::cuda;
  int number = 0;
  for (const auto& [m, d] : sizes)
    for (const DType dtype : all_reduce_op().dtypes(backend->facts().kind)) {
      ++number;
      if (gpu && dtype != DType::bf16 && number % 3 != 0) continue;
      const Problem problem = peers(*backend, task, dtype, m, d, number % 4 == 3 ? "none" : "t5",
                                    number % 5 == 4 ? "no" : "yes");
      RankRun run(*backend, task, group.memory(), problem);
      for (const auto& variant :
           draw_variants(backend->facts(), all_reduce_op(), problem, random, gpu ? 2 : 1)) {
        const Plan plan = plan_of(*backend, problem, variant);
        for (const std::uint64_t seed : {1000u, 2000u, 3000u}) {
          CAPTURE(task.rank, problem.text(), variant.family->name(), variant.config.text(), seed);
          const std::string wrong = run.check(plan, seed);
          group.check();
          REQUIRE(wrong == "");
          REQUIRE(run.keeps_nans(plan));
        }
      }
    }
}

/// Compiles all of them at once, into the backend's cache.
void compile_all(Backend& backend, const std::vector<std::pair<Problem, Recipe>>& all) {
  std::vector<std::thread> compilers;
  for (const auto& [problem, recipe] : all)
    compilers.emplace_back([&backend, &problem = problem, &recipe = recipe] {
      try {
        const Plan plan(backend, all_reduce_op(), problem, recipe);
      } catch (const Error&) {  // whoever makes the plan next reports it
      }
    });
  for (auto& compiler : compilers) compiler.join();
}

/// All-reduces of random sizes, one after the other, by both families; the last of each is checked.
void run_many(const Task& task, int count) {
  const auto backend = open(task);
  Group group(*backend, {task.name, task.rank, task.ranks, std::uint64_t{1} << 20});
  std::mt19937_64 random(11);
  std::vector<std::pair<Problem, Recipe>> all;
  for (const int d : {512, 4096, 1024, 40, 129})
    for (int i = 0; i < 4; ++i) {
      const auto m = static_cast<int>(1 + random() % std::min<std::uint64_t>(64, 65536 / d));
      const Problem problem = peers(*backend, task, DType::bf16, m, d, "llama", "yes");
      const auto variants = draw_variants(backend->facts(), all_reduce_op(), problem, random, 0);
      for (const auto& variant : {variants.back(), variants.front()})
        all.push_back({problem, {{std::string(variant.family->name()), variant.config}}});
    }
  compile_all(*backend, all);
  std::vector<RankRun> runs;
  std::vector<Plan> plans;
  for (const auto& [problem, recipe] : all) {
    runs.emplace_back(*backend, task, group.memory(), problem);
    plans.emplace_back(*backend, all_reduce_op(), problem, recipe);
  }
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) {
    const std::size_t at = random() % plans.size();
    runs[at].run(plans[at], backend->stream());
    if (i % 1000 == 999) {
      backend->synchronize();
      group.check();
    }
  }
  if (task.rank == 0 && count > 100000)
    std::printf("%d all-reduces of %zu plans in %.1f s\n", count, plans.size(),
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  for (std::size_t at = 0; at < plans.size(); ++at)
    REQUIRE(runs[at].check(plans[at], 5000 + at) == "");
  group.check();
}

/// Prints the time of variants in CUDA graphs: "m d variant µs".
void time_variants(const Task& task) {
  const auto backend = open(task);
  Group group(*backend, {task.name, task.rank, task.ranks, std::uint64_t{64} << 20});
  using Size = std::pair<std::int64_t, std::int64_t>;
  std::vector<std::pair<std::string, std::vector<Size>>> list;
  const auto add = [&](const char* family, const std::vector<std::pair<int, int>>& configs,
                       const std::vector<Size>& sizes) {
    for (const auto& [threads, cluster] : configs)
      list.push_back({fmt::format("{}/threads={},cluster={}", family, threads, cluster), sizes});
  };
  const std::vector<Size> small{{1, 4096}, {6, 6144}, {16, 4096}, {64, 4096}, {138, 6144}};
  const std::vector<Size> large{{1024, 4096}, {2048, 4096}, {4096, 8192}};
  add("all_reduce_words", {{512, 1}, {256, 1}, {128, 1}, {256, 2}}, small);
  add("all_reduce_words", {{512, 1}, {256, 1}, {128, 1}, {64, 1}, {128, 2}, {64, 2}}, large);
  list.push_back(
      {"all_reduce_chunks/shots=1,senders=4,summers=256,parts=4,blocks=2", {{138, 6144}}});
  list.push_back({"all_reduce_chunks/shots=1,senders=2,summers=256,parts=1,blocks=2", large});
  std::vector<std::pair<Problem, Recipe>> all;
  for (const auto& [id, sizes] : list)
    for (const auto& [m, d] : sizes)
      all.push_back(
          {peers(*backend, task, DType::bf16, m, d, "llama", "yes"), {Variant::parse(id)}});
  compile_all(*backend, all);
  for (const auto& [id, sizes] : list)
    for (const auto& [m, d] : sizes) {
      const Problem problem = peers(*backend, task, DType::bf16, m, d, "llama", "yes");
      RankRun run(*backend, task, group.memory(), problem);
      const Variant variant = Variant::parse(id);
      std::string wrong;
      double best = 1, middle = 1;
      try {
        const Plan plan(*backend, all_reduce_op(), problem, Recipe{variant});
        if (m <= 1024) wrong = run.check(plan, 1000);
        const auto replay = backend->capture(20, [&](int, void* stream) { run.run(plan, stream); });
        std::vector<double> times;
        for (int i = 0; i < (m > 1024 ? 12 : 40); ++i) times.push_back(replay->sample());
        std::sort(times.begin(), times.end());
        best = times.front(), middle = times[times.size() / 2];
      } catch (const Error& error) {
        wrong = error.what();
      }
      group.check();
      if (task.rank == 0)
        std::printf("TIME %lld %lld %s %.2f %.2f %s\n", static_cast<long long>(m),
                    static_cast<long long>(d), id.c_str(), middle * 1e6, best * 1e6, wrong.c_str());
    }
}

/// A search on all ranks, whose clocks differ: what is slow by one is fast by the other. They
/// choose the same, and it is no slower by the slowest clock.
void search(const Task& task) {
  const auto backend = open(task);
  const bool gpu = backend->facts().kind == DeviceKind::cuda;
  const Group group(*backend, {task.name, task.rank, task.ranks, std::uint64_t{1} << 20});
  for (const auto& [m, d, output] : {std::tuple{3, 512, "same"},
                                     {40, 4096, "same"},
                                     {40, 4096, "fp8"},
                                     {3, 512, "fp8-static"}}) {
    Problem problem = peers(*backend, task, gpu ? DType::bf16 : DType::f32, m, d, "llama", "yes");
    problem.options["output"] = output;
    problem = canonical(all_reduce_op(), problem, backend->facts().kind);
    const bool quantised = problem.has("output", "fp8") || problem.has("output", "fp8-static");
    int calls = 0;
    const auto found = search_on_ranks(
        *backend, group, builtin_catalog(), all_reduce_op(), problem,
        default_recipe(all_reduce_op(), problem, backend->facts()),
        {.budget = std::chrono::milliseconds(quantised ? 2000
                                             : gpu     ? 6000
                                                       : 20000),
         .clock = [&](double seconds) {
           return task.rank == 0 ? seconds : seconds * (calls++ % 2 == 0 ? 1e-3 : 30.0);
         }});
    CAPTURE(task.rank, recipe_text(found.recipe), found.before, found.after, found.tried);
    CHECK(found.tried > 0);
    CHECK(found.after <= found.before);
    const auto chosen = static_cast<double>(fnv1a(recipe_text(found.recipe)) >> 12);
    CHECK(group.largest(chosen) == chosen);
    CHECK(group.largest(-chosen) == -chosen);
    CHECK(group.largest(found.after) == found.after);
    if (quantised) continue;
    // The group is as good as before.
    RankRun run(*backend, task, group.memory(), problem);
    CHECK(run.check(Plan(*backend, all_reduce_op(), problem, found.recipe), 1000) == "");
  }
  // Where the recipe to begin with takes all of the budget, another one is tried all the same.
  const Problem quick =
      peers(*backend, task, gpu ? DType::bf16 : DType::f32, 40, 4096, "none", "no");
  const auto found = search_on_ranks(*backend, group, builtin_catalog(), all_reduce_op(), quick,
                                     default_recipe(all_reduce_op(), quick, backend->facts()),
                                     {.budget = std::chrono::milliseconds(0)});
  CHECK(found.tried == 1);
  CHECK_FALSE(found.complete);
  // Ranks that begin with other problems are told so.
  const Problem other = peers(*backend, task, DType::f32, 3 + task.rank, 512, "none", "no");
  CHECK_THROWS_WITH(search_on_ranks(*backend, group, builtin_catalog(), all_reduce_op(), other,
                                    default_recipe(all_reduce_op(), other, backend->facts()), {}),
                    ContainsSubstring("give all ranks the same"));
  // So are those that would end at other times.
  const Problem one = peers(*backend, task, DType::f32, 3, 512, "none", "no");
  CHECK_THROWS_WITH(search_on_ranks(*backend, group, builtin_catalog(), all_reduce_op(), one,
                                    default_recipe(all_reduce_op(), one, backend->facts()),
                                    {.budget = std::chrono::milliseconds(100 + task.rank)}),
                    ContainsSubstring("budgets"));
}

bool same_on_all(const Group& group, double value) {
  return group.largest(value) == value && group.largest(-value) == -value;
}

/// A search whose record rank 0 writes, with clocks that differ by a thousand. The ranks then find
/// the record as any other, and choose its recipe.
void search_for_presets(const Task& task, const std::filesystem::path& folder) {
  const auto backend = open(task);
  const Catalog catalog = builtin_catalog();
  const Group group(*backend, {task.name, task.rank, task.ranks, std::uint64_t{1} << 20});
  const DType dtype = backend->facts().kind == DeviceKind::cuda ? DType::bf16 : DType::f32;
  const std::vector<Problem> problems{
      small_layer(backend->facts().kind, dtype, task.ranks, "peers"),
      peers(*backend, task, dtype, 3, 512, "llama", "yes")};
  for (const Problem& problem : problems) {
    const Op& op = catalog.op(problem.op);
    const auto found = search_on_ranks(
        *backend, group, catalog, op, problem, fallback_recipe(op, problem, backend->facts()),
        {.budget = std::chrono::milliseconds(300), .presets = folder, .clock = [&](double seconds) {
           return task.rank == 1 ? 1000 * seconds : seconds;
         }});
    REQUIRE(found.record);
    const PresetRecord& record = *found.record;
    CAPTURE(task.rank, problem.text(), recipe_text(found.recipe), record.verdict.median_us);
    CHECK(record.error > 0);
    CHECK(record.error <= record.tolerance);
    CHECK(same_on_all(group, record.verdict.median_us));
    CHECK(same_on_all(group, record.stages.back().median_us));
    CHECK(record.verdict.median_us > 1000 * 0.1);  // by the slowest clock
    CHECK(record.verdict.untuned_ratio);
    REQUIRE(record.recipe() == found.recipe);

    const PresetLibrary presets = PresetLibrary::load({folder});
    CHECK(presets.complaints().empty());
    const Choice choice = choose(catalog, op, problem, backend->facts(), presets);
    REQUIRE(choice.preset);
    CHECK(choice.preset->exact_shape);
    CHECK_FALSE(choice.stale);
    CHECK(choice.recipe == found.recipe);
    CHECK(same_on_all(group, static_cast<double>(fnv1a(recipe_text(choice.recipe)) >> 12)));
    // One rank that plays all is another problem.
    Problem alone = problem;
    alone.options["link"] = "loopback";
    CHECK_FALSE(
        choose(catalog, op, canonical(op, alone, backend->facts().kind), backend->facts(), presets)
            .preset);
  }
}

/// A search that ends at once leaves a faster recipe on record in its place.
void search_again(const Task& task, const std::filesystem::path& folder) {
  const auto backend = open(task);
  const Group group(*backend, {task.name, task.rank, task.ranks, std::uint64_t{1} << 20});
  const Problem problem = peers(*backend, task, DType::f32, 40, 4096, "none", "no");
  const Recipe start = default_recipe(all_reduce_op(), problem, backend->facts());
  const auto found_by = [&](const std::function<double(int call)>& clock) {
    int calls = 0;
    return search_on_ranks(*backend, group, builtin_catalog(), all_reduce_op(), problem, start,
                           {.budget = std::chrono::milliseconds(0),
                            .presets = folder,
                            .clock = [&](double) { return clock(calls++); }})
        .recipe;
  };
  constexpr int calls_each = 6;  // a first run and five samples
  // The one recipe that it tries is faster than the one to begin with.
  const Recipe recorded = found_by([](int call) { return call < calls_each ? 1.0 : 0.5; });
  CHECK(recorded != start);
  // It is as fast as the other in the search, and faster in turns with it.
  const Recipe kept =
      found_by([](int call) { return call >= 2 * calls_each && call % 2 == 1 ? 0.5 : 1.0; });
  CAPTURE(task.rank, recipe_text(start), recipe_text(recorded));
  CHECK(recipe_text(kept) == recipe_text(recorded));
}

/// A search whose record cannot be written is an error on all ranks before it begins.
void search_without_folder(const Task& task, const std::filesystem::path& folder) {
  const auto backend = open(task);
  const Group group(*backend, {task.name, task.rank, task.ranks, std::uint64_t{1} << 20});
  const Problem problem = peers(*backend, task, DType::f32, 3, 512, "llama", "yes");
  CHECK_THROWS_WITH(search_on_ranks(*backend, group, builtin_catalog(), all_reduce_op(), problem,
                                    default_recipe(all_reduce_op(), problem, backend->facts()),
                                    {.budget = std::chrono::hours(1), .presets = folder / "file"}),
                    ContainsSubstring(task.rank == 0 ? "choose one that you may write to"
                                                     : "another rank could not write its presets"));
}

/// Searches for presets again and again, until another rank is killed.
void search_until_error(const Task& task, const std::filesystem::path& folder) {
  std::string error;
  try {
    const auto backend = open(task);
    const Group group(*backend, {task.name, task.rank, task.ranks, std::uint64_t{1} << 20,
                                 std::chrono::milliseconds(700)});
    for (;;) {
      const Problem problem = peers(*backend, task, DType::f32, 3, 64, "none", "no");
      search_on_ranks(*backend, group, builtin_catalog(), all_reduce_op(), problem,
                      default_recipe(all_reduce_op(), problem, backend->facts()),
                      {.budget = std::chrono::milliseconds(5), .presets = folder});
    }
  } catch (const Error& caught) {
    error = caught.what();
  }
  CAPTURE(task.rank, error);
  const bool told = error.find("died") != std::string::npos ||
                    error.find("came within") != std::string::npos ||
                    error.find("did not") != std::string::npos;
  CHECK(told);
}

/// Runs a collective until it fails; returns the error. The group may fail to come about instead.
/// Calls `runs` behind the first one.
std::string run_until_error(const Task& task, std::int64_t m, int most, std::uint64_t max_bytes,
                            std::shared_ptr<Backend> backend = nullptr,
                            const std::function<void()>& runs = nullptr) {
  try {
    if (!backend) backend = open(task);
    const bool gpu = backend->facts().kind == DeviceKind::cuda;
    // A rank that is killed before the meeting is missed for all of this time.
    Group group(*backend, {task.name, task.rank, task.ranks, max_bytes,
                           std::chrono::milliseconds(gpu                      ? 20000
                                                     : task.work == "survive" ? 300
                                                                              : 5000)});
    std::mt19937_64 random(1);
    const Problem problem = peers(*backend, task, DType::f32, m, 64, "none", "no");
    RankRun run(*backend, task, group.memory(), problem);
    const Plan plan =
        plan_of(*backend, problem,
                draw_variants(backend->facts(), all_reduce_op(), problem, random, 0).front());
    for (int i = 0; i < most; ++i) {
      run.run(plan, backend->stream());
      backend->synchronize();
      group.check();
      if (i == 0 && runs) runs();
    }
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

bool ended_well(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

/// How far a rank that survives others has come: one file for each group that ran, and one for each
/// that ended, in a folder that whoever kills the others sees.
struct Progress {
  std::filesystem::path folder;

  static void add(const std::filesystem::path& file, const std::string& text) {
    std::ofstream(file.string() + ".new") << text;
    std::filesystem::rename(file.string() + ".new", file);
  }
  std::filesystem::path ran(int group) const { return folder / fmt::format("ran{}", group); }
  std::filesystem::path ended(int group) const { return folder / fmt::format("ended{}", group); }
  std::filesystem::path stop() const { return folder / "stop"; }
  bool has_run(int group) const { return std::filesystem::exists(ran(group)); }
  bool has_ended(int group) const { return std::filesystem::exists(ended(group)); }
};

/// Whether it is true within 30 s.
bool comes(const std::function<bool()>& is_true) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!is_true()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

constexpr int endless = 1 << 30;

/// Rank 1 is killed, and this one learns of it.
void survive(const Task& task) {
  const std::string error = run_until_error(task, 3, endless, 1 << 16);
  CAPTURE(task.rank, error);
  CHECK((has(error, "rank 1 died") || has(error, "came within") || has(error, "did not arrive")));
}

/// Rank 1 is killed again and again: each time a new group of the same name is the remedy.
void survive_all(const Task& task, const Progress& progress) {
  const std::shared_ptr<Backend> backend = open(task);
  for (int group = 0; !std::filesystem::exists(progress.stop()); ++group) {
    bool ran = false;
    const std::string error = run_until_error(task, 3, endless, 1 << 16, backend, [&] {
      ran = true;
      Progress::add(progress.ran(group), "");
    });
    CAPTURE(task.rank, group, ran, error);
    CHECK((ran ? has(error, "rank 1 died") : has(error, "died") || has(error, "came within")));
    Progress::add(progress.ended(group), error);
  }
}

/// Rank 1 brings other rows.
void differ(const Task& task) {
  const std::string error = run_until_error(task, 2 + task.rank, endless, 1 << 16);
  CAPTURE(task.rank, error);
  CHECK((has(error, "another problem") || has(error, "has left") || has(error, "did not arrive")));
  if (task.rank == 0) CHECK(has(error, "rank 1"));
}

/// Rank 1 ends after ten collectives.
void stop_early(const Task& task) {
  const std::string error = run_until_error(task, 1, task.rank == 1 ? 10 : endless, 1 << 16);
  CAPTURE(task.rank, error);
  if (task.rank != 1) CHECK(has(error, "rank 1 has left"));
  if (task.rank == 1) CHECK(error == "");
}

/// A rank whose process forks, whose threads run collectives at once, and which ends its group
/// while one of them waits.
void use_from_elsewhere(const Task& task) {
  const auto backend = open(task);
  auto group = std::make_unique<Group>(
      *backend, GroupOptions{task.name, task.rank, task.ranks, 1 << 16, std::chrono::seconds(20)});
  const Problem problem = peers(*backend, task, DType::f32, 3, 64, "none", "no");
  std::mt19937_64 random(1);
  const Plan plan =
      plan_of(*backend, problem,
              draw_variants(backend->facts(), all_reduce_op(), problem, random, 0).front());
  const auto error_of_run = [&]() -> std::string {
    return test::error_of(
        [&] { RankRun(*backend, task, group->memory(), problem).run(plan, backend->stream()); });
  };
  CHECK(error_of_run() == "");
  if (const pid_t child = ::fork(); child == 0) {
    const bool told = has(error_of_run(), "before fork()");
    group.reset();
    ::_exit(told ? 0 : 1);
  } else {
    CHECK(ended_well(child));
  }
  const auto errors = on_threads(3, [&](int) {
    RankRun run(*backend, task, group->memory(), problem);
    std::string wrong;
    for (int i = 0; i < 200; ++i) wrong += run.check(plan, 1000);
    return wrong;
  });
  for (const auto& error : errors) CHECK(error == "");
  group->check();
  group->largest(0);
  if (task.rank != 0) {
    group->largest(0);
    return;
  }
  std::string error;
  std::thread waits([&] { error = error_of_run(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  group->largest(0);
  const auto start = std::chrono::steady_clock::now();
  group.reset();
  waits.join();
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  CHECK(has(error, "has left"));
}

/// Rank 1 ends without a word, and a child of its process lives on for longer than a wait does.
void leave_a_child(const Task& task) {
  const std::string error = run_until_error(task, 1, endless, 1 << 16, nullptr, [&] {
    if (task.rank == 0) return;
    if (::fork() == 0) std::this_thread::sleep_for(std::chrono::seconds(8));
    ::_exit(0);
  });
  CAPTURE(error);
  CHECK(has(error, "rank 1 died"));
}

/// Rank 1 asks for other memory: no rank gets a group.
void disagree(const Task& task) {
  const std::string error = run_until_error(task, 1, 1, task.rank == 1 ? 4096 : 8192);
  CAPTURE(task.rank, error);
  CHECK(has(error, "max_bytes is 4096 on rank 1 and 8192 on rank 0"));
}

pid_t start_rank(int rank, int ranks, const std::string& name, const std::string& device,
                 const std::string& work) {
  std::string what =
      fmt::format("FFTUNE_TEST_RANK={} {} {} {} {}", rank, ranks, name, device, work);
  std::vector<char*> variables;
  for (char** variable = environ; *variable != nullptr; ++variable)
    if (!std::string_view(*variable).starts_with("FFTUNE_TEST_RANK="))
      variables.push_back(*variable);
  variables.push_back(what.data());
  variables.push_back(nullptr);
  std::string program = "/proc/self/exe", filter = "[rank]";
  char* const arguments[] = {program.data(), filter.data(), nullptr};
  pid_t child = 0;
  REQUIRE(::posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, variables.data()) ==
          0);
  return child;
}

std::string new_name() {
  static int groups = 0;
  return fmt::format("test-{}-{}", ::getpid(), groups++);
}

/// Kills a rank of two at random moments, the meeting among them, and starts a group of the same
/// name again each time.
void kill_ranks(const std::string& device, int times, int most_milliseconds, std::uint64_t seed = 3,
                const std::string& work = "survive", int killed = 1) {
  std::mt19937_64 random(seed);
  const std::string name = new_name();
  for (int i = 0; i < times; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const pid_t survivor = start_rank(1 - killed, 2, name, device, work);
    const pid_t victim = start_rank(killed, 2, name, device, work);
    std::this_thread::sleep_for(std::chrono::microseconds(
        random() % (1000 * static_cast<std::uint64_t>(most_milliseconds))));
    ::kill(victim, SIGKILL);
    ended_well(victim);
    CAPTURE(i);
    REQUIRE(ended_well(survivor));
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
  }
}

/// Kills rank 1 of one survivor, which opens its device once, at random moments: of three in four
/// times when collectives run, and else while it starts and meets.
void kill_peers(const std::string& device, int times, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const testing::TemporaryFolder folder;
  const Progress progress{folder.path()};
  const std::string name = new_name(), work = "survive-all:" + folder.path().string();
  const pid_t survivor = start_rank(0, 2, name, device, work);
  int group = 0;
  double starts_in = 1;  // seconds from the start of rank 1 to collectives
  for (int i = 0; i < times; ++i) {
    CAPTURE(i, group);
    const auto start = std::chrono::steady_clock::now();
    const pid_t victim = start_rank(1, 2, name, device, "survive");
    const bool is_last = i + 1 == times, has_to_run = i == 0 || is_last || random() % 4 != 0;
    const double share = static_cast<double>(random() % 1000) / 1000;
    if (has_to_run) {
      CHECK(comes([&] {
        // The survivor may have given a group up in which none came.
        while (progress.has_ended(group) && !progress.has_run(group)) ++group;
        return progress.has_run(group);
      }));
      starts_in = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    std::this_thread::sleep_for(
        std::chrono::duration<double>(share * (has_to_run ? 0.2 : starts_in)));
    if (is_last) Progress::add(progress.stop(), "");
    ::kill(victim, SIGKILL);
    ended_well(victim);
    while (progress.has_run(group)) {
      const auto killed = std::chrono::steady_clock::now();
      REQUIRE(comes([&] { return progress.has_ended(group); }));
      CHECK(std::chrono::steady_clock::now() - killed < std::chrono::seconds(5));
      ++group;
    }
  }
  CHECK(ended_well(survivor));
}

/// Starts this program once for each rank, and returns whether all ended well.
bool start_ranks(int ranks, const std::string& device, const std::string& work) {
  const std::string name = new_name();
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank)
    children.push_back(start_rank(rank, ranks, name, device, work));
  bool good = true;
  for (const pid_t child : children) good = ended_well(child) && good;
  return good;
}

}  // namespace

TEST_CASE("a rank of a group that another case starts", "[.rank]") {
  const char* const given = std::getenv("FFTUNE_TEST_RANK");
  if (given == nullptr) FFTUNE_SKIP("another case starts it");
  Task task;
  std::istringstream(given) >> task.rank >> task.ranks >> task.name >> task.device >> task.work;
  if (task.work == "verify") verify_all(task);
  if (task.work == "large") verify_all(task, {{700, 512}, {2049, 40}});
  if (task.work == "many") run_many(task, 2000);
  if (task.work == "most") run_many(task, 1000000);
  if (task.work == "kills")
    kill_peers(task.device, 10, 100 + static_cast<std::uint64_t>(task.rank));
  if (task.work == "search") search(task);
  if (task.work == "time") time_variants(task);
  const std::string kind = task.work.substr(0, task.work.find(':'));
  const std::string folder = task.work.substr(std::min(task.work.size(), kind.size() + 1));
  if (kind == "presets") search_for_presets(task, folder);
  if (kind == "again") search_again(task, folder);
  if (kind == "no-folder") search_without_folder(task, folder);
  if (kind == "search-on") search_until_error(task, folder);
  if (task.work == "survive") survive(task);
  if (kind == "survive-all") survive_all(task, {folder});
  if (task.work == "differ") differ(task);
  if (task.work == "leave") stop_early(task);
  if (task.work == "disagree") disagree(task);
  if (task.work == "elsewhere") use_from_elsewhere(task);
  if (task.work == "child") leave_a_child(task);
}

TEST_CASE("all-reduce: two and three processes have the same bits on the CPU") {
  CHECK(start_ranks(2, "cpu", "verify"));
  CHECK(start_ranks(3, "cpu", "verify"));
}

TEST_CASE("all-reduce: thousands of random sizes on the CPU") {
  CHECK(start_ranks(2, "cpu", "many"));
}

TEST_CASE("ranks whose clocks differ choose the same variants, on the CPU") {
  CHECK(start_ranks(2, "cpu", "search"));
  CHECK(start_ranks(3, "cpu", "search"));
}

TEST_CASE("a search on ranks writes a record, which all ranks choose, on the CPU") {
  for (const int ranks : {2, 3}) {
    const testing::TemporaryFolder folder;
    CHECK(start_ranks(ranks, "cpu", "presets:" + folder.path().string()));
    const auto files = read_preset_folder(folder.path());
    REQUIRE(files.size() == 2);
    for (const PresetFile& file : files) {
      CHECK(file.complaints.empty());
      REQUIRE(file.records.size() == 1);
      CHECK(file.records.front().verdict.strategy == "ranks");
      CHECK(file.records.front().problem.size("ranks") == ranks);
    }
  }
}

TEST_CASE("a search on ranks that ends at once keeps the recipe on record") {
  const testing::TemporaryFolder folder;
  CHECK(start_ranks(2, "cpu", "again:" + folder.path().string()));
}

TEST_CASE("a search on ranks whose record cannot be written is an error on all of them") {
  const testing::TemporaryFolder folder;
  std::ofstream(folder.path() / "file") << "kept";
  CHECK(start_ranks(2, "cpu", "no-folder:" + folder.path().string()));
}

TEST_CASE("a rank that is killed while ranks search leaves their presets whole") {
  const testing::TemporaryFolder folder;
  for (const int killed : {0, 1}) {
    kill_ranks("cpu", 5, 300, 5, "search-on:" + folder.path().string(), killed);
    for (const PresetFile& file : read_preset_folder(folder.path())) {
      CHECK(file.complaints.empty());
      CHECK(file.records.size() == 1);
    }
  }
}

TEST_CASE("a search on ranks writes a record, which all ranks choose, on one GPU", "[gpu]") {
  if (open_first_cuda() == nullptr) FFTUNE_SKIP("no GPU");
  const testing::TemporaryFolder folder;
  CHECK(start_ranks(2, "cuda:0", "presets:" + folder.path().string()));
}

TEST_CASE("ranks whose clocks differ choose the same variants, on one GPU", "[gpu]") {
  if (open_first_cuda() == nullptr) FFTUNE_SKIP("no GPU");
  CHECK(start_ranks(2, "cuda:0", "search"));
}

namespace {

/// The work of each rank by a thread of this process, for variants that are drawn before.
void run_as_threads(int ranks, const std::string& device, const std::string& name) {
  struct Work {
    Problem problem;
    std::vector<DrawnVariant> variants;
  };
  std::vector<Work> works;
  {
    const Task task{0, ranks, name, device, ""};
    const auto backend = open(task);
    const DType dtype = backend->facts().kind == DeviceKind::cuda ? DType::bf16 : DType::f32;
    std::mt19937_64 random(7);
    for (const auto& [m, d] : {std::pair{1, 4096}, {37, 264}}) {
      const Problem problem = peers(*backend, task, dtype, m, d, "t5", "yes");
      works.push_back(
          {problem, draw_variants(backend->facts(), all_reduce_op(), problem, random, 1)});
    }
  }
  const auto wrong = on_threads(ranks, [&](int rank) {
    const Task task{rank, ranks, name, device, ""};
    const auto backend = open(task);
    const Group group(*backend, {name, rank, ranks, std::uint64_t{2} << 20});
    std::string found;
    for (const Work& work : works) {
      RankRun run(*backend, task, group.memory(), work.problem);
      for (const auto& variant : work.variants) {
        const Plan plan = plan_of(*backend, work.problem, variant);
        for (const std::uint64_t seed : {1000u, 2000u, 3000u}) {
          found += run.check(plan, seed);
          group.check();
        }
      }
    }
    return found;
  });
  for (const std::string& own : wrong) CHECK(own == "");
}

}  // namespace

TEST_CASE("all-reduce: ranks that are threads have the same bits, on the CPU") {
  run_as_threads(2, "cpu", new_name());
  run_as_threads(3, "cpu", new_name());
}

TEST_CASE("ranks that are threads on one GPU are one line on each", "[gpu]") {
  if (open_first_cuda() == nullptr) FFTUNE_SKIP("no GPU");
  const std::string name = new_name();
  for (const std::string& own : on_threads(2, [&](int rank) {
         const auto backend = open({rank, 2, name, "cuda:0", ""});
         const Group group(*backend, {name, rank, 2, 4096, std::chrono::seconds(20)});
         return std::string();
       }))
    CHECK_THAT(own, ContainsSubstring("two ranks of this process are on GPU"));
}

TEST_CASE("ranks meet at the file of a socket, which is gone afterwards") {
  const std::string path = fmt::format("/tmp/fftune-test-{}.socket", ::getpid());
  run_as_threads(2, "cpu", path);
  CHECK(::access(path.c_str(), F_OK) != 0);
  // That of a process which was killed is in nobody's way.
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(path.begin(), path.end(), address.sun_path);
  const int left = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
  REQUIRE(::bind(left, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  ::close(left);
  CHECK(::access(path.c_str(), F_OK) == 0);
  run_as_threads(2, "cpu", path);
  CHECK(::access(path.c_str(), F_OK) != 0);
}

TEST_CASE("all-reduce: two processes on one GPU have the same bits", "[gpu]") {
  if (open_first_cuda() == nullptr) FFTUNE_SKIP("no GPU");
  CHECK(start_ranks(2, "cuda:0", "verify"));
}

TEST_CASE("all-reduce: three processes on one GPU have the same bits", "[gpu]") {
  if (open_first_cuda() == nullptr) FFTUNE_SKIP("no GPU");
  CHECK(start_ranks(3, "cuda:0", "verify"));
}

TEST_CASE("all-reduce: four processes have the same bits, in two shots too, on one GPU", "[gpu]") {
  if (open_first_cuda() == nullptr) FFTUNE_SKIP("no GPU");
  CHECK(start_ranks(4, "cuda:0", "large"));
}

TEST_CASE("a rank that is killed is an error on the other, 200 times, and nothing is left of it") {
  kill_ranks("cpu", 200, 25);
}

TEST_CASE("a rank whose peer is killed makes a new group of the same name, again and again") {
  kill_peers("cpu", 10, 3);
}

TEST_CASE("ranks that call different collectives, or fewer, get an error in bounded time") {
  CHECK(start_ranks(2, "cpu", "differ"));
  CHECK(start_ranks(2, "cpu", "leave"));
  CHECK(start_ranks(3, "cpu", "leave"));
  CHECK(start_ranks(2, "cpu", "disagree"));
}

TEST_CASE("a rank forks, uses its group from several threads, and ends it while one waits") {
  CHECK(start_ranks(2, "cpu", "elsewhere"));
}

TEST_CASE("a rank that ends while a child of its process lives is missed at once") {
  CHECK(start_ranks(2, "cpu", "child"));
}

TEST_CASE("all-reduce: ranks that end or differ are errors on one GPU", "[gpu]") {
  if (open_first_cuda() == nullptr) FFTUNE_SKIP("no GPU");
  kill_peers("cuda:0", 8, 3);
  CHECK(start_ranks(2, "cuda:0", "differ"));
  CHECK(start_ranks(2, "cuda:0", "leave"));
}

TEST_CASE("options of a group that are wrong are one line") {
  const auto backend = open_cpu();
  const auto error_of = [&](GroupOptions options) -> std::string {
    return test::error_of([&] { Group group(*backend, options); });
  };
  CHECK(error_of({"a", 0, 9, 1}) == "ranks is 9: a group has 1 to 8");
  CHECK(error_of({"a", 2, 2, 1}) == "rank is 2: use 0 to 1");
  CHECK(error_of({"", 0, 2, 1}) == "the group's name has 0 bytes: use 1 to 90, or a path");
  CHECK(has(error_of({std::string(91, 'a'), 0, 2, 1}), "91 bytes: use 1 to 90"));
  CHECK(has(error_of({"/tmp/" + std::string(103, 'a'), 0, 2, 1}), "108 bytes: use 1 to 107"));
  CHECK(has(error_of({"./socket", 0, 2, 1}), "'./socket' is no absolute path"));
  CHECK(has(error_of({"a\nb", 0, 2, 1}), "control character"));
  CHECK(has(error_of({"a", 0, 2, 0}), "max_bytes is 0"));
  const std::chrono::milliseconds soon(30);
  CHECK(has(error_of({new_name(), 0, 2, 1, soon}), "1 of 2 ranks came within 0.03 s"));
  CHECK(has(error_of({new_name(), 1, 2, 1, soon}), "rank 0 did not come within 0.03 s"));
  CHECK(has(error_of({"a", 0, 2, 1, std::chrono::milliseconds::max()}),
            "timeout is 9223372036854775807 ms: use 1 to 31536000000, a year"));
}

namespace {

/// While there is one, the process can open `more` files at most.
class FewFiles {
 public:
  explicit FewFiles(rlim_t more) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const int next = ::dup(0);
    ::close(next);
    const rlimit few{static_cast<rlim_t>(next) + more, before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &few);
  }
  ~FewFiles() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_ = {};
};

}  // namespace

TEST_CASE("ranks without a file descriptor to meet by say so at once") {
#ifdef __SANITIZE_ADDRESS__  // its checks of objects open a pipe, and fail without one
  FFTUNE_SKIP("a sanitizer needs descriptors of its own");
#endif
  const auto backend = open_cpu();
  const std::string name = new_name(), place = '\0' + ("fftune-group-" + name);
  const int peer = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(place.begin(), place.end(), address.sun_path);
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + place.size());
  std::thread connecting([&] {
    while (::connect(peer, reinterpret_cast<const sockaddr*>(&address), bytes) != 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  const auto start = std::chrono::steady_clock::now();
  {
    const FewFiles few(2);  // its memory and the listening socket
    CHECK_THROWS_WITH(Group(*backend, {name, 0, 2, 1}),
                      ContainsSubstring("no socket for the ranks to meet: Too many open"));
  }
  connecting.join();
  ::close(peer);
  {
    const FewFiles few(1);
    CHECK_THROWS_WITH(Group(*backend, {name, 1, 2, 1}),
                      ContainsSubstring("no socket for the ranks to meet: Too many open"));
  }
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));
}

TEST_CASE("a file that is no socket stays where a group would have its own") {
  const testing::TemporaryFolder folder;
  const auto path = folder.path() / "file";
  std::ofstream(path) << "kept";
  const auto backend = open_cpu();
  CHECK_THROWS_WITH(Group(*backend, {path.string(), 0, 2, 64, std::chrono::seconds(1)}),
                    ContainsSubstring("Address already in use"));
  CHECK(std::filesystem::file_size(path) == 4);
  CHECK_THROWS_WITH(
      Group(*backend, {(path / "socket").string(), 0, 2, 64, std::chrono::seconds(1)}),
      ContainsSubstring("give a path in a folder"));
}

TEST_CASE("ranks of several versions of the library are one line on both") {
  const auto backend = open_cpu();
  // A rank of another version, whose messages have another length: it says so first.
  const std::uint64_t other = 0x39394f5254554646;
  for (const int own : {0, 1}) {
    const std::string name = "/tmp/" + new_name();
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy(name.begin(), name.end(), address.sun_path);
    const auto* const at = reinterpret_cast<const sockaddr*>(&address);
    const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (own == 1) {
      REQUIRE(::bind(socket, at, sizeof address) == 0);
      REQUIRE(::listen(socket, 1) == 0);
    }
    std::thread peer([&] {
      int connection = socket;
      if (own == 1)
        connection = ::accept(socket, nullptr, nullptr);
      else
        while (::connect(socket, at, sizeof address) != 0) std::this_thread::yield();
      CHECK(::send(connection, &other, sizeof other, MSG_NOSIGNAL) == sizeof other);
      if (own == 1) ::close(connection);
    });
    const auto begin = std::chrono::steady_clock::now();
    CHECK_THROWS_WITH(Group(*backend, {name, own, 2, 64, std::chrono::seconds(20)}),
                      ContainsSubstring("several versions of fftune"));
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
    peer.join();
    ::close(socket);
    ::unlink(name.c_str());
  }
}

TEST_CASE("a group of one rank needs no peer, and messages that are too large are refused") {
  const auto backend = open_cpu();
  Group group(*backend, {"alone", 0, 1, 64});
  const Task task{0, 1, "alone", "cpu", ""};
  std::mt19937_64 random(1);
  for (const std::int64_t d : {16, 64, 65}) {
    const Problem problem = peers(*backend, task, DType::f32, 1, d, "none", "no");
    RankRun run(*backend, task, group.memory(), problem);
    const Plan plan =
        plan_of(*backend, problem,
                draw_variants(backend->facts(), all_reduce_op(), problem, random, 0).front());
    // Slots are multiples of 256 bytes.
    if (d <= 64)
      CHECK(run.check(plan, 1) == "");
    else
      CHECK_THROWS_WITH(run.check(plan, 1), ContainsSubstring("larger than the group's memory"));
  }
}

namespace {

bool has_two_gpus() {
  const auto devices = list_devices(read_environment()).found;
  return std::count_if(devices.begin(), devices.end(), [](const auto& device) {
           return device.facts.kind == DeviceKind::cuda;
         }) >= 2;
}

}  // namespace

TEST_CASE("all-reduce: ranks that are threads have the same bits, on two GPUs", "[gpu][gpus]") {
  if (!has_two_gpus()) FFTUNE_SKIP("no two GPUs");
  run_as_threads(2, "cuda", new_name());
}

TEST_CASE("all-reduce: two GPUs have the same bits", "[gpu][gpus]") {
  if (!has_two_gpus()) FFTUNE_SKIP("no two GPUs");
  CHECK(start_ranks(2, "cuda", "verify"));
}

TEST_CASE("all-reduce: a million collectives of random sizes on two GPUs", "[gpu][gpus]") {
  if (!has_two_gpus()) FFTUNE_SKIP("no two GPUs");
  CHECK(start_ranks(2, "cuda", "most"));
}

TEST_CASE("all-reduce: ranks that end or differ are errors on two GPUs", "[gpu][gpus]") {
  if (!has_two_gpus()) FFTUNE_SKIP("no two GPUs");
  kill_peers("cuda", 8, 3);
  CHECK(start_ranks(2, "cuda", "differ"));
  CHECK(start_ranks(2, "cuda", "leave"));
}

TEST_CASE("a rank that is killed is an error on the other GPU, 200 times", "[gpu][gpus][.kills]") {
  if (!has_two_gpus()) FFTUNE_SKIP("no two GPUs");
  // A process takes seconds to open its GPU: 20 of them kill ten ranks each.
  CHECK(start_ranks(20, "cuda", "kills"));
}

TEST_CASE("all-reduce: times of variants on two GPUs", "[gpu][gpus][.time]") {
  if (!has_two_gpus()) FFTUNE_SKIP("no two GPUs");
  CHECK(start_ranks(2, "cuda", "time"));
}
