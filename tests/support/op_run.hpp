// An op's tensors on a device, each between guards, to run programs on them and to look at what
// these wrote.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device/backend.hpp"
#include "registry/catalog.hpp"
#include "runtime/plan.hpp"
#include "support/catch.hpp"
#include "verify/device_tensors.hpp"

namespace fftune::test {

class OpRun {
 public:
  /// Random values in every tensor, the same for the same seed; `extra` follow the op's.
  OpRun(Backend& backend, const Op& op, const Problem& problem,
        const std::vector<TensorSpec>& extra = {}, std::uint64_t seed = 1);

  /// The random values of a seed in every tensor.
  void draw(std::uint64_t seed);

  const std::vector<TensorSpec>& specs() const { return specs_; }

  /// Which tensors' guards were written, for people; empty if none were.
  std::string damage() const;

  void write(const std::string& tensor, const std::vector<std::byte>& bytes);

  /// Makes `tensor` another name of `same`.
  void alias(const std::string& tensor, const std::string& same);

  /// Gives a tensor other values.
  void set(const std::string& tensor, const std::vector<float>& values);

  using Executables = std::vector<std::shared_ptr<const Executable>>;
  Executables compile(const std::vector<Program>& programs);
  Executables compile(const Op& op, const Problem& problem, const Recipe& recipe);

  /// As a plan does: nothing waits between one stage and the next but the kernels themselves. Runs
  /// share their workspace, as a plan's do.
  void run(const Executables& executables);
  void run(const Program& program) { run(compile(std::vector<Program>{program})); }
  void run(const Op& op, const Problem& problem, const Recipe& recipe);

  std::vector<std::byte> bytes(const std::string& tensor) const;
  std::vector<float> values(const std::string& tensor) const;

 private:
  Backend* backend_;
  std::vector<TensorSpec> specs_;
  std::vector<std::unique_ptr<GuardedBuffer>> buffers_;
  std::unique_ptr<Buffer> workspace_;
  std::vector<void*> addresses_;
};

/// The norm of the difference over the norm of the second.
double relative_difference(const std::vector<float>& first, const std::vector<float>& second);

/// Every baseline writes what the untuned recipe writes, within `tolerance`.
void check_baselines(Backend& backend, const Op& op, const Problem& problem, double tolerance);

/// Gradients that accumulate into `pairs` {gradient, what it is added to} in place are, bit by bit,
/// those that are added to a copy.
void check_in_place(Backend& backend, const Op& op, const Problem& problem,
                    const std::vector<std::pair<std::string, std::string>>& pairs);

}  // namespace fftune::test
