// The values of a problem's inputs: random values of a seed, or given values, such as the weights
// of a saved model. Verification and timing both take them from here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.hpp"
#include "device/program.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Values for some of an op's inputs.
class GivenTensors {
 public:
  virtual ~GivenTensors() = default;
  /// Fills `out`, spec.bytes() long, with the input's values in its dtype and returns true; or
  /// returns false: it is not given, and is drawn. If the tensor's rows are tokens, row i must not
  /// depend on how many there are. Throws Error(invalid_input) if the given values do not fit.
  virtual bool fill(const TensorSpec& spec, std::span<std::byte> out, Parallel& parallel) const = 0;
};

struct InputData {
  /// Random values alone.
  InputData(std::uint64_t random_seed) : seed(random_seed) {}  // NOLINT: a seed is such data
  /// `tensors` must outlive all users of this.
  InputData(std::uint64_t random_seed, const GivenTensors* tensors)
      : seed(random_seed), given(tensors) {}

  std::uint64_t seed = 0;
  const GivenTensors* given = nullptr;  // null: nothing is given
  /// Other values for those of `given` that are NaN or infinite; each group is for some of them. A
  /// place of a result which all of a group leave the same number is independent of those that they
  /// replace. Where its reference is NaN, it may be this number: 0 · NaN is NaN, and a kernel may
  /// skip a product by 0.
  std::vector<std::vector<const GivenTensors*>> substitutes = {};
  /// Inputs that are in memory of the caller, by name: the memory of a group, which its collectives
  /// change. They are neither filled nor compared.
  std::map<std::string, void*> in_place = {};
};

// Random tensors whose row r depends on (seed, name, r) alone: any prefix of rows is the same for
// every number of rows, on every machine and with any number of threads.

/// Fills `out` with rows x columns values of `dtype`, row-major, of the given standard deviation
/// `scale` and mean. Each is the sum of four uniform 16-bit integers (Irwin-Hall), which stands in
/// for the normal distribution: a few operations each, no libm and so the same bits everywhere, and
/// no value beyond 3.47 standard deviations that would overflow fp16.
void random_rows(std::uint64_t seed, std::string_view name, DType dtype, double scale, double mean,
                 std::int64_t rows, std::int64_t columns, void* out, Parallel& parallel);

}  // namespace fftune
