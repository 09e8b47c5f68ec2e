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

// In parts, each of a minute or so: a run on a device may be limited in time.
TEST_CASE("random problems of attention are right on the GPU, first part", "[gpu][random1]") {
  verify_on_gpu(attention_op(), random_attention, 150);
}

TEST_CASE("random problems of attention are right on the GPU, second part", "[gpu][random2]") {
  verify_on_gpu(attention_op(), random_attention, 150, 20, 4);
}

TEST_CASE("random problems of attention are right on the GPU, third part", "[gpu][random3]") {
  verify_on_gpu(attention_op(), random_attention, 150, 20, 5);
}

TEST_CASE("a few small problems of attention are right on the GPU", "[gpu][small]") {
  verify_small_on_gpu(attention_op(), random_attention);
}

TEST_CASE("every CUDA family of attention has a space with its default in it, and legal launches") {
  check_cuda_spaces(attention_op(), random_attention);
}
