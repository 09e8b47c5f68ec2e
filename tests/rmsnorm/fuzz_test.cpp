// Random problems against the float64 reference, on every family of a device.
#include <random>

#include "cpu/open.hpp"
#include "rmsnorm/problems.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("ten thousand small random problems are right on the CPU") {
  const auto backend = open_cpu();
  std::mt19937_64 random(1);
  for (int i = 0; i < 10000; ++i) {
    const Problem problem = random_rmsnorm(DeviceKind::cpu, random, 600);
    REQUIRE(verify_variants(*backend, rmsnorm_op(), problem, random, i % 4 == 0 ? 1 : 0) > 0);
  }
}

TEST_CASE("large problems of every width are right on the CPU, by every variant") {
  const auto backend = open_cpu();
  std::mt19937_64 random(2);
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

TEST_CASE("500 random problems are right on the GPU", "[gpu]") {
  const auto backend = open_first_cuda();
  if (!backend) FFTUNE_SKIP("there is no CUDA device here");
  std::mt19937_64 random(3);
  for (int i = 0; i < 500; ++i) {
    const Problem problem =
        random_rmsnorm(DeviceKind::cuda, random, i % 10 == 0 ? 1 << 20 : 1 << 14);
    REQUIRE(verify_variants(*backend, rmsnorm_op(), problem, random, 1) > 0);
  }
}
