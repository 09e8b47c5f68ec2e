// Random problems against the float64 reference, on every family of a device; and the CUDA spaces.
#include "kernels/gated_rmsnorm/gated_rmsnorm.hpp"
#include "support/fuzz_cases.hpp"

namespace fftune::test {

Problem random_problem(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  auto [m, d] = draw.matrix(most_elements, gated_rmsnorm::most_features);
  std::map<std::string, std::int64_t> sizes{{"m", m}, {"d", d}};
  const std::int64_t groups = draw.below(2) ? 1 + draw.below(8) : 1;
  if (groups > 1 && groups * d <= most_elements) {
    sizes["groups"] = groups;
    sizes["m"] = std::max<std::int64_t>(1, m / groups);
  }
  const std::int64_t own_groups = sizes.contains("groups") ? groups : 1;
  Problem problem{"gated-rmsnorm",
                  draw.of({"fwd", "bwd"}),
                  draw.of(gated_rmsnorm_op().dtypes(kind)),
                  sizes,
                  {{"order", draw.of({"after", "before"})},
                   {"gate", draw.of({"silu", "sigmoid"})},
                   {"convention", draw.of({"t5", "llama"})},
                   {"weights", draw.of({"same", "f32"})},
                   {"eps", draw.of({"1e-06", "1e-05", "0.5"})}}};
  const bool forward = problem.pass == "fwd", row_gate = forward && draw.below(3) == 0;
  if (row_gate) problem.options["gate-for"] = "norm";
  if (forward && draw.below(3) == 0) {
    problem.options["norm"] = "none";
    problem.options["order"] = "after";
    problem.options["convention"] = "t5";
  } else if (forward && draw.below(3) == 0) {
    problem.options["weights-for"] = "token";
  }
  if (draw.below(3) == 0)
    problem.sizes["z-row"] = own_groups * (row_gate ? 1 : d) + 8 * draw.below(3) + draw.below(2);
  return maybe_frozen(gated_rmsnorm_op(), canonical(gated_rmsnorm_op(), problem, kind), kind, draw);
}

const FuzzCases<gated_rmsnorm_op, random_problem> gated_rmsnorm_cases;

}  // namespace fftune::test
