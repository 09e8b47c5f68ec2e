// The state of a LocalEvaluator: the opened device, and everything that was prepared for one
// problem.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "measure/buffer_sets.hpp"
#include "measure/runner.hpp"
#include "tuning/evaluate/local_evaluator.hpp"
#include "verify/host_threads.hpp"
#include "verify/verifier.hpp"

namespace fftune {

using Executables = std::vector<std::shared_ptr<const Executable>>;

struct LocalEvaluator::State {
  struct Failure {
    std::string text;
    bool device_fault = false;
    bool cancelled = false;
  };

  State(Backend& device, const Catalog& all, InputData inputs, CancelFlags flags)
      : backend(device), catalog(all), data(std::move(inputs)), cancel(flags) {}

  void release();
  /// A verifier for the problem; reuses the previous one if only the number of tokens differs.
  void make_verifier(const Problem& before);

  /// Runs `body`; an exception is a failure, and a device that stays broken is lost.
  template <typename Body>
  std::optional<Failure> attempt(Body&& body) {
    if (!lost.empty()) return Failure{"the device is lost: " + lost, true};
    try {
      body();
      return {};
    } catch (const Cancelled& cancelled) {
      return Failure{cancelled.what(), false, true};
    } catch (const Error& error) {
      const bool fault = error.kind() == ErrorKind::device_fault;
      if (fault) find_if_lost();
      return Failure{error.what(), fault};
    } catch (const std::exception& error) {
      return Failure{error.what(), false};
    }
  }
  void find_if_lost();

  /// Tells the observer, if there is one, that the candidate runs next.
  void announce(std::size_t index, const Candidate& candidate, double expected_seconds) const {
    if (launching) launching(index, candidate, expected_seconds);
  }

  CompileResult compile_program(const std::string& key, const std::function<Program()>& program);
  /// `first`: without programmatic dependent launch. The launch before the first one of a candidate
  /// is the last of the previous pass, which it would overlap; no plan repeats itself like that.
  CompileResult compile_variant(const Recipe& recipe, std::size_t place, bool first);
  const Baseline& baseline(const std::string& name) const;
  /// Everything the candidate consists of, in order. Throws nothing.
  std::vector<CompileResult> compile_all(const Candidate& candidate);
  /// Throws Error(unavailable) if compilation fails.
  Executables executables(const Candidate& candidate);
  /// The executables of a timing: if the problem repeats another several times, those of every
  /// repetition.
  Executables timed_executables(const Candidate& candidate);
  std::size_t stage_count(const Candidate& candidate) const;
  void reserve_workspace(const Executables& all);
  /// For each tensor of a verification, whether the candidate's programs have it.
  std::vector<bool> used_by(const Candidate& candidate) const;
  /// Gives up the memory of intermediates that the untuned recipe does not have, if all together do
  /// not fit in `there`, and says so in the setup.
  void choose_holders(std::size_t there, Setup& setup);
  /// Why a program cannot run: it has a tensor without memory. Empty if it can.
  std::string without_memory(const Program& program) const;
  /// Realistic values for the intermediates: the untuned recipe's results, if they are right.
  void compute_intermediates();
  bool is_avoided(const Candidate& candidate) const;
  std::vector<std::vector<void*>> tensors_of(const Candidate& candidate);

  Backend& backend;
  const Catalog& catalog;
  InputData data;
  CancelFlags cancel;
  std::optional<ReferenceFile> references;
  std::string lost;
  LaunchObserver launching;
  CompileObserver compiling;
  std::set<std::string> avoided;  // ids of variants and of candidates

  // State of the problem that begin() prepared.
  const Op* op = nullptr;
  Problem problem;
  std::vector<TensorSpec> tensors;
  Holders holders;  // of the sets
  std::vector<StageSpec> stages;
  std::vector<Baseline> baselines;
  std::unique_ptr<Verifier> verifier;
  std::optional<BufferSets> sets;
  SetRotation rotation;
  std::map<std::string, std::optional<BufferSets>> extras;  // of a baseline, by its name
  std::unique_ptr<Buffer> workspace;
  std::mutex mutex;                               // guards compiled
  std::map<std::string, CompileResult> compiled;  // by variant id, or baseline name
  std::map<std::string, double> pass_seconds;     // by candidate id, when it was last timed
};

}  // namespace fftune
