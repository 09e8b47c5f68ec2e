// The evaluator of a device that this process has opened.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "tuning/evaluate/evaluator.hpp"
#include "verify/input_data.hpp"
#include "verify/verifier.hpp"

namespace fftune {

class LocalEvaluator : public Evaluator {
 public:
  /// Both must outlive it. `data` is what the tensors hold. `references` is the descriptor
  /// of a ReferenceFile that goes from one process to the next; -1: there is none. Once a flag of
  /// `cancel` is set, what needs such work is not verified.
  LocalEvaluator(Backend& backend, const Catalog& catalog, InputData data, int references = -1,
                 CancelFlags cancel = {});
  ~LocalEvaluator() override;

  const DeviceFacts& facts() const override;
  Limits limits(DType dtype) override;
  Setup begin(const Problem& problem) override;
  std::vector<Compiled> compile(const Candidates& candidates, const CompileSink& sink) override;
  Verified verify(const Candidate& candidate) override;
  std::vector<Timing> time(const Candidates& candidates, const TimeRequest& request) override;
  void avoid(std::set<std::string> ids) override;
  std::vector<std::string> disturbances() override;
  std::string lost() const override;

  /// Called just before a candidate runs, with its place in the request and the seconds that this
  /// run should take (0: unknown). Ahead of a measurement, so it must be quick.
  using LaunchObserver =
      std::function<void(std::size_t index, const Candidate&, double expected_seconds)>;
  /// Called, by any thread, as the compilation of a candidate begins.
  using CompileObserver = std::function<void(std::size_t index)>;
  void observe(LaunchObserver launching, CompileObserver compiling);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Compiling many variants at once.

/// How many compilations run at once here: one a core, and at most one for each half gigabyte of
/// memory, which is what an optimising assembler may take.
unsigned compile_threads();

}  // namespace fftune
