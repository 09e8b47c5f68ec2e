// Verification: random or given inputs, poisoned outputs, guard regions, the float64 reference.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/backend.hpp"
#include "registry/op.hpp"
#include "verify/input_data.hpp"
#include "verify/references.hpp"

namespace fftune {

struct Verification {
  bool passed = false;
  double error = 0;           // ‖out − ref‖ / ‖ref‖, the largest over the outputs
  double tolerance = 0;       // derived: docs/precision.md
  std::string failure;        // one line; empty if passed
  std::string bits;           // hash of what leaves the run, if it passed
  bool wrote_beyond = false;  // into a guard region or an input, so perhaps elsewhere too
};

/// Flags that end work once they are set; null: never.
struct CancelFlags {
  const std::atomic<bool>* references = nullptr;  // A reference that is not known yet.
  const std::atomic<bool>* inputs = nullptr;      // The values of the tensors.
};

/// Verifies executables against the reference of one problem. Building one draws the inputs and
/// computes the reference (of a few distinct rows that repeat for any number of tokens); verify
/// may then be called for many candidates. Not thread-safe.
class Verifier {
 public:
  using Executables = std::vector<std::shared_ptr<const Executable>>;

  /// `backend`, `op` and `kept` must outlive it. References in `kept` are of the same data.
  /// References that `kept` has are not computed, and others are kept there once something passed.
  /// Throws Error(unavailable) if the device is too small. Once a flag of `cancel` is set, what
  /// needs such work throws Cancelled.
  Verifier(Backend& backend, const Op& op, Problem problem, InputData data,
           ReferenceFile* kept = nullptr, CancelFlags cancel = {});
  ~Verifier();

  /// The same layer at another number of tokens. The weights stay on the device and what is known
  /// of the reference is kept, so a sweep over token counts draws, uploads and computes once.
  void retoken(std::int64_t tokens);
  /// With the current number of tokens.
  const Problem& problem() const;

  /// Runs stages [first_stage, first_stage + stage_count) by `executables` in order, twice, on
  /// poisoned outputs between guard regions: every element written, none beyond, the same bits
  /// both times, the error within the tolerance. Inputs of the first stage that are intermediates
  /// hold the reference rounded to their dtype. A device fault is thrown as Error(device_fault).
  /// `used`, for each tensor: whether they have it; empty: any. Intermediates that they do not have
  /// take no memory.
  Verification verify(std::size_t first_stage, std::size_t stage_count,
                      const Executables& executables, const std::vector<bool>& used = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The factor by which errors of sums may exceed their usual size, for an output with
/// this many distinct elements: a few of them may cancel to almost nothing together.
constexpr double cancellation(std::int64_t elements) {
  return 1 + 64 / static_cast<double>(elements);
}

/// The tensor cores' sums of fp8 products keep 13 bits below their largest addend, so that 128 of
/// them are off by up to this part of their usual size.
constexpr double fp8_sum_error = 6e-4;

/// The tolerance for the relative error of an output with `elements` distinct elements. `dtype` is
/// the coarsest that the run rounds to, and `reduction_length` the number of terms summed for an
/// element over all stages. `rounding_error` is the error of a reference that rounds where the
/// kernels do. For an op that is made of others, `stages` is how many round one after the other.
/// Derived in docs/precision.md.
double tolerance(DType dtype, double rounding_error, std::int64_t reduction_length,
                 std::int64_t elements, std::int64_t stages = 1);

}  // namespace fftune
