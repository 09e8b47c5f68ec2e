// Random problems against the float64 reference, on every family of a device; and the CUDA spaces.
#include "attention/problems.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("two thousand small random problems of attention are right on the CPU") {
  verify_small_on_cpu(attention_op(), random_attention, 2000);
}

TEST_CASE("larger random problems of attention are right on the CPU") {
  verify_larger_on_cpu(attention_op(), random_attention);
}
