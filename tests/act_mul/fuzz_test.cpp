// Random problems against the float64 reference, on every family of a device; and the CUDA spaces.
#include "kernels/act_mul/act_mul.hpp"
#include "support/fuzz_cases.hpp"

namespace fftune::test {

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

const FuzzCases<act_mul_op, random_problem> act_mul_cases;

}  // namespace fftune::test
