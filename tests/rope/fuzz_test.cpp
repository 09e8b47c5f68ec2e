// Random problems against the float64 reference, on every family of a device; and the CUDA spaces.
#include "rope/problems.hpp"
#include "support/fuzz_cases.hpp"

namespace fftune::test {

const FuzzCases<rope_op, random_rope> rope_cases;

}  // namespace fftune::test
