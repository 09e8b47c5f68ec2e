// Random problems against the float64 reference, on every family of a device; and the CUDA spaces.
#include "support/fuzz.hpp"
#include "kernels/bias_gelu/bias_gelu.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem random_problem(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const auto [m, h] = draw.matrix(most_elements);
  return canonical(bias_gelu_op(),
                   {"bias-gelu",
                    draw.of({"fwd", "bwd"}),
                    draw.of(bias_gelu_op().dtypes(kind)),
                    {{"m", m}, {"h", h}},
                    {{"act", draw.of({"gelu-tanh", "gelu"})},
                     {"biases", draw.of({"same", "f32"})},
                     {"save", draw.of({"nothing", "input"})}}},
                   kind);
}

}  // namespace

TEST_CASE("ten thousand small random problems are right on the CPU") {
  verify_small_on_cpu(bias_gelu_op(), random_problem);
}

TEST_CASE("larger random problems are right on the CPU") {
  verify_larger_on_cpu(bias_gelu_op(), random_problem);
}

TEST_CASE("500 random problems are right on the GPU", "[gpu]") {
  verify_on_gpu(bias_gelu_op(), random_problem);
}

TEST_CASE("a few small problems are right on the GPU", "[gpu][small]") {
  verify_small_on_gpu(bias_gelu_op(), random_problem);
}

TEST_CASE("every CUDA family has a space with its default in it, and legal launches") {
  check_cuda_spaces(bias_gelu_op(), random_problem);
}
