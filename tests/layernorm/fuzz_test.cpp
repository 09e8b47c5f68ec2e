// Random problems against the float64 reference, on every family of a device; and the CUDA spaces.
#include "layernorm/problems.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("four thousand small random problems are right on the CPU") {
  verify_small_on_cpu(layernorm_op(), random_layernorm, 4000);
}

TEST_CASE("larger random problems are right on the CPU") {
  verify_larger_on_cpu(layernorm_op(), random_layernorm, 40);
}

TEST_CASE("300 random problems are right on the GPU", "[gpu]") {
  verify_on_gpu(layernorm_op(), random_layernorm, 300);
}

TEST_CASE("a few small problems are right on the GPU", "[gpu][small]") {
  verify_small_on_gpu(layernorm_op(), random_layernorm);
}

TEST_CASE("every problem has a CUDA family, with a default that its space allows") {
  check_cuda_spaces(layernorm_op(), random_layernorm, 600);
}
