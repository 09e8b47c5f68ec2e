// Verification: random inputs, poisoned outputs, guard regions, the float64 reference.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/backend.hpp"
#include "registry/op.hpp"

namespace fftune {

struct Verification {
  bool passed = false;
  double error = 0;      // ‖out − ref‖ / ‖ref‖, the largest over the outputs
  double tolerance = 0;  // derived: docs/precision.md
  std::string failure;   // one line; empty if passed
};

/// Verifies executables against the reference of one problem. Building one draws the inputs and
/// computes the reference (a few distinct rows, repeated, stand for any number of tokens); verify
/// may then be called for many candidates. Not thread-safe.
class Verifier {
 public:
  Verifier(Backend& backend, const Op& op, Problem problem, std::uint64_t seed);
  ~Verifier();

  /// Runs stages [first_stage, first_stage + stage_count) by `executables` in order, twice, on
  /// poisoned outputs between guard regions: every element written, none beyond, the same bits
  /// both times, the error within the tolerance. Inputs of the first stage that are intermediates
  /// hold the reference rounded to their dtype. A device fault is thrown as Error(device_fault).
  Verification verify(std::size_t first_stage, std::size_t stage_count,
                      const std::vector<std::shared_ptr<const Executable>>& executables);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The tolerance for a run of stages, given the reference with and without rounding. See
/// docs/precision.md.
double tolerance(DType dtype, double rounding_error, std::int64_t reduction_length);

}  // namespace fftune
