// Random problems against the float64 reference, on every family of a device.
#include "norm/problems.hpp"
#include "support/fuzz_cases.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("rmsnorm: large problems of every width are right on the CPU, by every variant") {
  const auto backend = open_cpu();
  for (const auto& pass : {"fwd", "bwd"})
    for (const DType dtype : rmsnorm_op().dtypes(DeviceKind::cpu))
      for (const auto& [m, d] : {std::pair{1, 65536}, {3, 65535}, {70, 4096}, {301, 129}}) {
        const Problem problem = rmsnorm_problem(DeviceKind::cpu, pass, dtype, m, d);
        Verifier verifier(*backend, rmsnorm_op(), problem, 3);
        for (const Family* family : rmsnorm_op().families()) {
          if (family->device_kind() != DeviceKind::cpu ||
              family->refusal(problem, backend->facts()))
            continue;
          for (const Config& config : family->space(problem, backend->facts()).feasible()) {
            CAPTURE(problem.text(), config.text());
            const auto compiled =
                backend->compile(family->program(problem, backend->facts(), config));
            const auto result = verifier.verify(0, 1, {compiled.executable});
            CAPTURE(result.failure, result.error, result.tolerance);
            REQUIRE(result.passed);
          }
        }
      }
}

const FuzzCases<rmsnorm_op, random_rmsnorm, FuzzCounts{.larger = 0, .spaces = 600}> rmsnorm_cases;
const FuzzCases<layernorm_op, random_layernorm,
                FuzzCounts{.small = 4000, .larger = 40, .gpu = 300, .spaces = 600}>
    layernorm_cases;
