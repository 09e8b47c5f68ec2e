// Random problems against the float64 reference, on every family of a device; and the CUDA spaces.
#include "rope/problems.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("ten thousand small random problems are right on the CPU") {
  verify_small_on_cpu(rope_op(), random_rope);
}

TEST_CASE("larger random problems are right on the CPU") {
  verify_larger_on_cpu(rope_op(), random_rope);
}

TEST_CASE("500 random problems are right on the GPU", "[gpu]") {
  verify_on_gpu(rope_op(), random_rope);
}

TEST_CASE("a few small problems are right on the GPU", "[gpu][small]") {
  verify_small_on_gpu(rope_op(), random_rope);
}

TEST_CASE("every CUDA family has a space with its default in it, and legal launches") {
  check_cuda_spaces(rope_op(), random_rope);
}
