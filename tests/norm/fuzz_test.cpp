// Random problems against the float64 reference, on every family of a device.
#include "norm/problems.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("rmsnorm: ten thousand small random problems are right on the CPU") {
  verify_small_on_cpu(rmsnorm_op(), random_rmsnorm);
}

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

TEST_CASE("rmsnorm: 500 random problems are right on the GPU", "[gpu]") {
  verify_on_gpu(rmsnorm_op(), random_rmsnorm);
}

TEST_CASE("rmsnorm: a few small problems are right on the GPU", "[gpu][small]") {
  verify_small_on_gpu(rmsnorm_op(), random_rmsnorm);
}

TEST_CASE("layernorm: four thousand small random problems are right on the CPU") {
  verify_small_on_cpu(layernorm_op(), random_layernorm, 4000);
}

TEST_CASE("layernorm: larger random problems are right on the CPU") {
  verify_larger_on_cpu(layernorm_op(), random_layernorm, 40);
}

TEST_CASE("layernorm: 300 random problems are right on the GPU", "[gpu]") {
  verify_on_gpu(layernorm_op(), random_layernorm, 300);
}

TEST_CASE("layernorm: a few small problems are right on the GPU", "[gpu][small]") {
  verify_small_on_gpu(layernorm_op(), random_layernorm);
}
