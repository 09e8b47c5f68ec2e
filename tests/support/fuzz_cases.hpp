// The cases of an op whose problems are drawn at random. One file of its folder includes this and
// defines the two functions; problems are small enough for a device to have many of them right.
#pragma once

#include "support/fuzz.hpp"

namespace fftune::test {

const Op& fuzzed_op();
/// As DrawProblem.
Problem random_problem(DeviceKind kind, Draw& draw, std::int64_t most_elements);

TEST_CASE("ten thousand small random problems are right on the CPU") {
  verify_small_on_cpu(fuzzed_op(), random_problem);
}

TEST_CASE("larger random problems are right on the CPU") {
  verify_larger_on_cpu(fuzzed_op(), random_problem);
}

TEST_CASE("500 random problems are right on the GPU", "[gpu]") {
  verify_on_gpu(fuzzed_op(), random_problem);
}

TEST_CASE("a few small problems are right on the GPU", "[gpu][small]") {
  verify_small_on_gpu(fuzzed_op(), random_problem);
}

TEST_CASE("every CUDA family has a space with its default in it, and legal launches") {
  check_cuda_spaces(fuzzed_op(), random_problem);
}

}  // namespace fftune::test
