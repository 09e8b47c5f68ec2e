// Random problems against the float64 reference, on every family of a device; and the CUDA spaces.
#include "qkv/problems.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("two thousand small random problems are right on the CPU") {
  verify_small_on_cpu(qkv_op(), random_qkv, 2000);
}

TEST_CASE("larger random problems are right on the CPU") {
  verify_larger_on_cpu(qkv_op(), random_qkv, 30);
}

TEST_CASE("fifty random problems are right on the GPU", "[gpu]") {
  verify_on_gpu(qkv_op(), random_qkv, 50);
}

TEST_CASE("a few small problems are right on the GPU", "[gpu][small]") {
  verify_small_on_gpu(qkv_op(), random_qkv);
}

TEST_CASE("every CUDA family has a space with its default in it, and legal launches") {
  check_cuda_spaces(qkv_op(), random_qkv, 1000);
}
