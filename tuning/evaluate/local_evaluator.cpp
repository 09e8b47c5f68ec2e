#include "tuning/evaluate/local_evaluator.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/memory.hpp"
#include "core/parallel_until.hpp"
#include "tuning/evaluate/local_state.hpp"

namespace fftune {

unsigned compile_threads() {
  const auto pages = static_cast<double>(sysconf(_SC_PHYS_PAGES));
  const auto memory = pages * static_cast<double>(sysconf(_SC_PAGESIZE));
  const auto by_memory = static_cast<unsigned>(std::clamp(memory / (512 << 20), 1.0, 1024.0));
  return std::max(1u, std::min(std::thread::hardware_concurrency(), by_memory));
}

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

LocalEvaluator::LocalEvaluator(Backend& backend, const Catalog& catalog, InputData data,
                               int references, CancelFlags cancel)
    : state_(std::make_unique<State>(backend, catalog, std::move(data), cancel)) {
  if (references >= 0) state_->references.emplace(references);
}

LocalEvaluator::~LocalEvaluator() = default;

const DeviceFacts& LocalEvaluator::facts() const {
  return state_->backend.facts();
}

Limits LocalEvaluator::limits(DType dtype) {
  return state_->backend.limits(dtype);
}

std::vector<std::string> LocalEvaluator::disturbances() {
  return state_->backend.disturbances();
}

std::string LocalEvaluator::lost() const {
  return state_->lost;
}

void LocalEvaluator::avoid(std::set<std::string> ids) {
  state_->avoided = std::move(ids);
}

void LocalEvaluator::observe(LaunchObserver launching, CompileObserver compiling) {
  state_->launching = std::move(launching);
  state_->compiling = std::move(compiling);
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
  const auto failure = state.attempt([&] {
    const auto require = [&](const char* what, std::size_t there) {
      require_fit(what, static_cast<double>(setup.bytes_per_set), static_cast<double>(there),
                  facts().name);
    };
    const auto there = state.backend.free_bytes();
    state.choose_holders(there, setup);
    setup.bytes_per_set = layout_of(state.tensors, state.holders).bytes;
    require("it", there);
    state.make_verifier(before);
    const auto left = state.backend.free_bytes();
    setup.buffer_sets = set_count(state.stages, setup.bytes_per_set, facts(), left);
    if (setup.buffer_sets == 0) require("it, beside what its verification takes,", left);
    state.sets.emplace(state.backend, state.tensors, setup.buffer_sets, state.data, state.holders);
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

std::vector<Compiled> LocalEvaluator::compile(const Candidates& candidates,
                                              const CompileSink& sink) {
  auto results = not_started(candidates.size());
  std::mutex one_at_a_time;
  GuardedSink guarded(sink);
  parallel_until(candidates.size(), compile_threads(), [&](std::size_t i) {
    if (state_->compiling) state_->compiling(i);
    results[i] = summary_of(state_->compile_all(candidates[i]));
    const std::lock_guard lock(one_at_a_time);
    return guarded(i, results[i]);
  });
  guarded.rethrow();
  return results;
}

Verified LocalEvaluator::verify(const Candidate& candidate) {
  auto& state = *state_;
  Verified verified;
  const auto failure = state.attempt([&] {
    const auto all = state.executables(candidate);
    state.announce(0, candidate, 0);
    const auto result = state.verifier->verify(candidate.first_stage, state.stage_count(candidate),
                                               all, state.used_by(candidate));
    verified.passed = result.passed;
    verified.error = result.error;
    verified.tolerance = result.tolerance;
    verified.failure = result.failure;
    verified.wrote_beyond = result.wrote_beyond;
    verified.bits = result.bits;
  });
  if (failure) {
    verified.passed = false;
    verified.failure = failure->text;
    verified.device_fault = failure->device_fault;
    verified.cancelled = failure->cancelled;
  }
  return verified;
}

}  // namespace fftune
