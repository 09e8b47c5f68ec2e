// Random problems against the float64 reference, on every family of a device; and the CUDA spaces.
#include "support/fuzz.hpp"
#include "kernels/act_mul/act_mul.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem random_problem(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const auto [m, h] = draw.matrix(most_elements);
  return canonical(act_mul_op(),
                   {"act-mul",
                    draw.of({"fwd", "bwd"}),
                    draw.of(act_mul_op().dtypes(kind)),
                    {{"m", m}, {"h", h}},
                    {{"act", draw.of(act_mul_op().options().front().choices)},
                     {"packed", draw.of({"no", "yes"})}}},
                   kind);
}

}  // namespace

TEST_CASE("ten thousand small random problems are right on the CPU") {
  verify_small_on_cpu(act_mul_op(), random_problem);
}

TEST_CASE("larger random problems are right on the CPU") {
  verify_larger_on_cpu(act_mul_op(), random_problem);
}

TEST_CASE("500 random problems are right on the GPU", "[gpu]") {
  verify_on_gpu(act_mul_op(), random_problem);
}

TEST_CASE("a few small problems are right on the GPU", "[gpu][small]") {
  verify_small_on_gpu(act_mul_op(), random_problem);
}

TEST_CASE("every CUDA family has a space with its default in it, and legal launches") {
  check_cuda_spaces(act_mul_op(), random_problem);
}
