// Random problems against the float64 reference, on every family of a device; and the CUDA spaces.
#include "kernels/bias_gelu/bias_gelu.hpp"
#include "support/fuzz_cases.hpp"

namespace fftune::test {

Problem random_problem(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const auto [m, h] = draw.matrix(most_elements);
  Problem problem = canonical(bias_gelu_op(),
                              {"bias-gelu",
                               draw.of({"fwd", "bwd"}),
                               draw.of(bias_gelu_op().dtypes(kind)),
                               {{"m", m}, {"h", h}},
                               {{"act", draw.of({"gelu-tanh", "gelu"})},
                                {"biases", draw.of({"same", "f32"})},
                                {"save", draw.of({"nothing", "input"})}}},
                              kind);
  return maybe_frozen(bias_gelu_op(), std::move(problem), kind, draw);
}

const FuzzCases<bias_gelu_op, random_problem> bias_gelu_cases;

}  // namespace fftune::test
