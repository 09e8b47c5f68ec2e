#include "norm/problems.hpp"

namespace fftune::test {

Problem rmsnorm_problem(DeviceKind kind, const std::string& pass, DType dtype, std::int64_t m,
                        std::int64_t d, std::map<std::string, std::string> options) {
  return canonical(rmsnorm_op(), {"rmsnorm", pass, dtype, {{"m", m}, {"d", d}}, std::move(options)},
                   kind);
}

Problem random_rmsnorm(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const auto [m, d] = draw.matrix(most_elements, norm::most_features);
  const std::string pass = draw.of({"fwd", "bwd"}), output = draw.of({"same", "fp8", "i8"});
  const bool any_residual = pass == "fwd" && output == "same";
  Problem problem = rmsnorm_problem(
      kind, pass, draw.of(rmsnorm_op().dtypes(kind)), m, d,
      {{"convention", draw.of({"llama", "gemma", "t5"})},
       {"residual", any_residual ? draw.of({"no", "yes", "after"}) : draw.of({"no", "yes"})},
       {"save", draw.of({"nothing", "rstd"})},
       {"weights", draw.of({"same", "f32"})},
       {"eps", draw.of({"1e-6", "1e-5", "0.1"})},
       {"output", output}});
  return maybe_frozen(rmsnorm_op(), std::move(problem), kind, draw);
}

Problem layernorm_problem(DeviceKind kind, const std::string& pass, DType dtype, std::int64_t m,
                          std::int64_t d, std::map<std::string, std::string> options) {
  return canonical(layernorm_op(),
                   {"layernorm", pass, dtype, {{"m", m}, {"d", d}}, std::move(options)}, kind);
}

Problem random_layernorm(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const auto [m, d] = draw.matrix(most_elements, norm::most_features);
  Problem problem = layernorm_problem(
      kind, draw.of({"fwd", "bwd"}), draw.of(layernorm_op().dtypes(kind)), m, d,
      {{"residual", draw.of({"no", "yes"})}, {"eps", draw.of({"1e-6", "1e-5", "0.1"})}});
  return maybe_frozen(layernorm_op(), std::move(problem), kind, draw);
}

}  // namespace fftune::test
