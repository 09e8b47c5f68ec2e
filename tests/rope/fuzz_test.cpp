// Random problems against the float64 reference, on every family of a device; and the CUDA spaces.
#include "rope/problems.hpp"
#include "support/fuzz_cases.hpp"

namespace fftune::test {

const Op& fuzzed_op() {
  return rope_op();
}

Problem random_problem(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  return random_rope(kind, draw, most_elements);
}

}  // namespace fftune::test
