#include "tuning/local_evaluator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <variant>

#include "core/error.hpp"
#include "tuning/buffer_sets.hpp"
#include "tuning/compile_pool.hpp"
#include "tuning/runner.hpp"
#include "verify/verifier.hpp"

namespace fftune {
namespace {

/// A first pass this long is a sample: what it found cold no longer matters.
constexpr double telling_seconds = 5e-3;
/// A first pass this long is not mistaken by more than a few percent, a shorter one may be by a
/// factor.
constexpr double trusted_seconds = 1e-3;
constexpr double doubt = 3;

struct Failure {
  std::string text;
  bool device_fault = false;
};

using Executables = std::vector<std::shared_ptr<const Executable>>;

}  // namespace

struct LocalEvaluator::State {
  Backend& backend;
  const Catalog& catalog;
  std::uint64_t seed;
  std::string lost;

  // Of the problem that was begun.
  const Op* op = nullptr;
  Problem problem;
  std::vector<TensorSpec> tensors;
  std::vector<StageSpec> stages;
  std::vector<Baseline> baselines;
  std::unique_ptr<Verifier> verifier;
  std::optional<BufferSets> sets;
  std::map<std::string, std::optional<BufferSets>> extras;  // of a baseline, by its name
  std::unique_ptr<Buffer> workspace;
  std::mutex mutex;                               // guards compiled
  std::map<std::string, CompileResult> compiled;  // by variant id, or baseline name
  std::map<std::string, double> pass_seconds;     // by candidate id, when it was last timed

  State(Backend& device, const Catalog& all, std::uint64_t random)
      : backend(device), catalog(all), seed(random) {}

  void release() {
    extras.clear();
    sets.reset();
    workspace.reset();
    compiled.clear();
    pass_seconds.clear();
  }

  /// A verifier for the problem: the one before, where only the number of tokens differs.
  void make_verifier(const Problem& before) {
    const auto token = op->token_size();
    const auto tokens = problem.size(token);
    if (verifier && before.op == problem.op && before.with_size(token, tokens) == problem) {
      verifier->retoken(tokens);
      return;
    }
    verifier.reset();
    verifier = std::make_unique<Verifier>(backend, *op, problem, seed);
  }

  /// Runs `body`; what it throws is a failure, and a device that stays broken is lost.
  template <typename Body>
  std::optional<Failure> attempt(Body&& body) {
    if (!lost.empty()) return Failure{"the device is lost: " + lost, true};
    try {
      body();
      return {};
    } catch (const Error& error) {
      const bool fault = error.kind() == ErrorKind::device_fault;
      if (fault) find_if_lost();
      return Failure{error.what(), fault};
    } catch (const std::exception& error) {
      return Failure{error.what(), false};
    }
  }

  void find_if_lost() {
    try {
      backend.synchronize();
      // The fault may be the last thing that worked: only new work shows.
      backend.allocate(256);
      backend.synchronize();
    } catch (const Error& error) {
      lost = error.what();
    }
  }

  CompileResult compile_program(const std::string& key, const std::function<Program()>& program) {
    {
      const std::lock_guard lock(mutex);
      if (const auto found = compiled.find(key); found != compiled.end()) return found->second;
    }
    CompileResult result;
    try {
      result = backend.compile(program());
    } catch (const std::exception& error) {
      result.report.failure = error.what();
    }
    if (!result.executable && result.report.failure.empty())
      result.report.failure = "the compiler gave no reason";
    const std::lock_guard lock(mutex);
    return compiled.emplace(key, std::move(result)).first->second;
  }

  /// A launch that may start early overlaps the one before it. First in a candidate, that one would
  /// be the same stage of the pass before, which no plan has: there it waits for its turn.
  CompileResult compile_variant(const Variant& variant, bool first) {
    return compile_program(variant.id() + (first ? " first" : ""), [&] {
      auto program =
          family_of(*op, variant.family).program(problem, backend.facts(), variant.config);
      if (!first || program.steps.empty()) return program;
      if (auto* launch = std::get_if<KernelLaunch>(&program.steps.front()))
        launch->programmatic = false;
      return program;
    });
  }

  const Baseline& baseline(const std::string& name) const {
    const auto found = std::find_if(baselines.begin(), baselines.end(),
                                    [&](const Baseline& entry) { return entry.name == name; });
    if (found == baselines.end())
      throw Error(ErrorKind::invalid_input, fmt::format("there is no baseline '{}'", name));
    return *found;
  }

  /// Everything the candidate consists of, in order. Throws nothing.
  std::vector<CompileResult> compile_all(const Candidate& candidate) {
    std::vector<CompileResult> results;
    for (const auto& variant : candidate.recipe)
      results.push_back(compile_variant(variant, results.empty()));
    if (!candidate.baseline.empty())
      results.push_back(compile_program(candidate.baseline,
                                        [&] { return baseline(candidate.baseline).program; }));
    return results;
  }

  /// Throws Error(unavailable) for what does not compile.
  Executables executables(const Candidate& candidate) {
    Executables all;
    for (auto& result : compile_all(candidate)) {
      if (!result.executable) throw Error(ErrorKind::unavailable, result.report.failure);
      all.push_back(std::move(result.executable));
    }
    return all;
  }

  std::size_t stage_count(const Candidate& candidate) const {
    std::size_t count = 0;
    for (const auto& variant : candidate.recipe)
      count += family_of(*op, variant.family).stages().size();
    return count;
  }

  void reserve_workspace(const Executables& all) {
    std::size_t bytes = 0;
    for (const auto& executable : all) bytes = std::max(bytes, executable->workspace_bytes());
    if (workspace && workspace->bytes() >= bytes) return;
    workspace.reset();
    if (bytes > 0) workspace = backend.allocate(bytes);
  }

  /// Realistic values for the intermediates: what the untuned recipe computes, if it is right.
  void compute_intermediates() {
    for (const bool fallback : {false, true}) {
      const auto failure = attempt([&] {
        Candidate untuned;
        untuned.recipe = fallback ? fallback_recipe(*op, problem, backend.facts())
                                  : default_recipe(*op, problem, backend.facts());
        const auto all = executables(untuned);
        if (const auto result = verifier->verify(0, stages.size(), all); !result.passed)
          throw Error(ErrorKind::unavailable, result.failure);
        reserve_workspace(all);
        for (const auto& executable : all)
          executable->enqueue(sets->tensors(0).data(), workspace ? workspace->data() : nullptr,
                              backend.stream());
        backend.synchronize();
      });
      if (!failure || !lost.empty()) return;
    }
  }

  std::vector<std::vector<void*>> tensors_of(const Candidate& candidate) {
    std::vector<std::vector<void*>> all;
    for (int set = 0; set < sets->count(); ++set) all.push_back(sets->tensors(set));
    if (candidate.baseline.empty()) return all;
    auto& extra = extras[candidate.baseline];
    if (!extra) {
      extra.emplace(backend, baseline(candidate.baseline).extra, sets->count(), seed + 1);
      extra->replicate();
    }
    for (int set = 0; set < sets->count(); ++set) {
      auto& addresses = all[static_cast<std::size_t>(set)];
      addresses.insert(addresses.end(), extra->tensors(set).begin(), extra->tensors(set).end());
    }
    return all;
  }
};

namespace {

Compiled summary_of(const std::vector<CompileResult>& results) {
  Compiled summary;
  summary.cached = true;
  for (const auto& result : results) {
    summary.seconds += result.report.seconds;
    summary.cached = summary.cached && result.report.cached;
    summary.spill_bytes += result.report.spill_bytes();
    if (summary.failure.empty()) summary.failure = result.report.failure;
    for (const auto& kernel : result.report.kernels) {
      summary.registers = std::max(summary.registers, kernel.registers);
      summary.shared_bytes = std::max(summary.shared_bytes, kernel.static_shared_bytes);
      summary.warnings.insert(summary.warnings.end(), kernel.warnings.begin(),
                              kernel.warnings.end());
    }
  }
  return summary;
}

}  // namespace

LocalEvaluator::LocalEvaluator(Backend& backend, const Catalog& catalog, std::uint64_t seed)
    : state_(std::make_unique<State>(backend, catalog, seed)) {}

LocalEvaluator::~LocalEvaluator() = default;

const DeviceFacts& LocalEvaluator::facts() const {
  return state_->backend.facts();
}

Limits LocalEvaluator::limits(DType dtype) {
  return state_->backend.limits(dtype);
}

std::string LocalEvaluator::lost() const {
  return state_->lost;
}

Setup LocalEvaluator::begin(const Problem& problem) {
  auto& state = *state_;
  state.release();
  const Problem before = std::exchange(state.problem, problem);
  state.op = &state.catalog.op(problem.op);
  state.tensors = state.op->tensors(problem);
  state.stages = state.op->stages(problem);
  state.baselines = state.op->baselines(problem, facts());
  Setup setup;
  setup.bytes_per_set = layout_of(state.tensors).bytes;
  const auto failure = state.attempt([&] {
    const auto there = state.backend.free_bytes();
    if (setup.bytes_per_set > there)
      throw Error(
          ErrorKind::unavailable,
          fmt::format("{} needs {} bytes of memory on {}, {} are free: choose smaller sizes",
                      problem.text(), setup.bytes_per_set, facts().name, there));
    state.make_verifier(before);
    const auto left = state.backend.free_bytes();
    setup.buffer_sets = set_count(state.stages, setup.bytes_per_set, facts().l2_bytes, left);
    if (setup.buffer_sets == 0)
      throw Error(ErrorKind::unavailable,
                  fmt::format("{} needs {} bytes of memory on {} beside what its verification "
                              "takes, {} are free: choose smaller sizes",
                              problem.text(), setup.bytes_per_set, facts().name, left));
    state.sets.emplace(state.backend, state.tensors, setup.buffer_sets, state.seed);
    state.compute_intermediates();
    state.sets->replicate();
    state.backend.synchronize();
  });
  if (failure) {
    setup.refusal = failure->text;
    state.release();
    state.verifier.reset();
  }
  return setup;
}

std::vector<Compiled> LocalEvaluator::compile(const std::vector<Candidate>& candidates,
                                              const CompileSink& sink) {
  Compiled not_started;
  not_started.failure = "not started";
  std::vector<Compiled> results(candidates.size(), not_started);
  std::mutex one_at_a_time;
  run_pool(candidates.size(), compile_threads(), [&](std::size_t i) {
    results[i] = summary_of(state_->compile_all(candidates[i]));
    const std::lock_guard lock(one_at_a_time);
    return sink(i, results[i]);
  });
  return results;
}

Verified LocalEvaluator::verify(const Candidate& candidate) {
  auto& state = *state_;
  Verified verified;
  const auto failure = state.attempt([&] {
    const auto result = state.verifier->verify(candidate.first_stage, state.stage_count(candidate),
                                               state.executables(candidate));
    verified.passed = result.passed;
    verified.error = result.error;
    verified.tolerance = result.tolerance;
    verified.failure = result.failure;
  });
  if (failure) {
    verified.passed = false;
    verified.failure = failure->text;
    verified.device_fault = failure->device_fault;
  }
  return verified;
}

std::vector<Timing> LocalEvaluator::time(const std::vector<Candidate>& candidates,
                                         const TimeRequest& request) {
  using Clock = std::chrono::steady_clock;
  const auto began = Clock::now();
  auto& state = *state_;
  std::vector<Timing> timings(candidates.size());
  std::vector<std::optional<Runner>> runners(candidates.size());
  const auto try_for = [&](std::size_t i, const auto& body) {
    if (const auto failure = state.attempt(body)) {
      timings[i].failure = failure->text;
      timings[i].device_fault = failure->device_fault;
      runners[i].reset();
    }
  };
  const auto take = [&](std::size_t i, double seconds) {
    timings[i].samples_us.push_back(seconds * 1e6);
    timings[i].abandoned = seconds * 1e6 > request.abandon_above_us;
    state.pass_seconds[candidates[i].id()] = seconds;
  };

  // One workspace serves all, and must not move once a sequence is captured.
  std::vector<Executables> all(candidates.size());
  for (std::size_t i = 0; i < candidates.size(); ++i)
    try_for(i, [&] {
      all[i] = state.executables(candidates[i]);
      state.reserve_workspace(all[i]);
      runners[i].emplace(state.backend, Pass{});
    });
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (!runners[i]) continue;
    try_for(i, [&] {
      runners[i].emplace(state.backend, Pass{all[i], state.tensors_of(candidates[i]),
                                             state.workspace ? state.workspace->data() : nullptr});
      const auto known = state.pass_seconds.find(candidates[i].id());
      if (known == state.pass_seconds.end()) {
        const double first = runners[i]->probe();
        const double limit = request.abandon_above_us * 1e-6;
        const bool hopeless = first > limit * (first < trusted_seconds ? doubt : 1);
        if (first >= telling_seconds || hopeless) take(i, first);
        state.pass_seconds[candidates[i].id()] = first;
      }
      if (timings[i].abandoned) return;
      const double expected = state.pass_seconds.at(candidates[i].id());
      runners[i]->plan(expected);
      // The first run of a captured sequence uploads it.
      if (expected < trusted_seconds) runners[i]->sample();
    });
  }

  for (int round = 0; round < request.samples; ++round) {
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      const bool sampled = timings[i].samples_us.size() > static_cast<std::size_t>(round);
      if (!runners[i] || timings[i].abandoned || sampled) continue;
      try_for(i, [&] { take(i, runners[i]->sample()); });
    }
    const std::chrono::duration<double> spent = Clock::now() - began;
    if (spent.count() >= request.seconds) break;
  }
  return timings;
}

}  // namespace fftune
