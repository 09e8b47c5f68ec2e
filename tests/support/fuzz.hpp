// Random problems of an op of one stage, and what must hold for each of them on every family.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/open.hpp"
#include "cuda/launch_limits.hpp"
#include "support/verify_variants.hpp"
#include "verify/host_threads.hpp"

namespace fftune::test {

/// Draws the fields of a problem.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}

  std::mt19937_64& random() { return random_; }
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(bound));
  }
  template <typename Value>
  Value of(const std::vector<Value>& values) {
    return values[static_cast<std::size_t>(below(std::ssize(values)))];
  }
  std::string of(std::initializer_list<const char*> words) {
    return words.begin()[below(std::ssize(words))];
  }
  /// From 1 to 2^most_bits, small ones likely.
  std::int64_t size(std::int64_t most_bits) {
    return 1 + below(std::int64_t{1} << (1 + below(most_bits)));
  }
  /// Rows and columns of at most `most_elements` together; columns are often a multiple of 8.
  std::pair<std::int64_t, std::int64_t> matrix(std::int64_t most_elements,
                                               std::int64_t most_columns = std::int64_t{1} << 20) {
    std::int64_t columns = size(16);
    if (below(2)) columns = (columns + 7) / 8 * 8;
    columns = std::min({columns, most_columns, most_elements});
    return {std::min(size(9), std::max<std::int64_t>(1, most_elements / columns)), columns};
  }

 private:
  std::mt19937_64 random_;
};

/// A backward pass, one in three of them without the gradients of weights.
Problem maybe_frozen(const Op& op, Problem problem, DeviceKind kind, Draw& draw);

/// A problem on a kind of device, of at most about that many elements.
using DrawProblem = Problem (*)(DeviceKind kind, Draw& draw, std::int64_t most_elements);

void verify_small_on_cpu(const Op& op, DrawProblem problem, int count = 10000);

void verify_larger_on_cpu(const Op& op, DrawProblem problem, int count = 60);

/// Every tenth problem has up to 2^`most_bits` elements, the others 2^6 times fewer.
void verify_on_gpu(const Op& op, DrawProblem problem, int count = 500, int most_bits = 20,
                   std::uint64_t seed = 3);

/// Few and small enough to run under compute-sanitizer, ragged like the others.
void verify_small_on_gpu(const Op& op, DrawProblem problem);

/// On architectures drawn at random: some CUDA family serves each problem, and every fallback of
/// its pass does; those that serve have their default in their space, and launches that the
/// hardware takes.
void check_cuda_spaces(const Op& op, DrawProblem draw_problem, int count = 400);

}  // namespace fftune::test
