#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "cpu/open.hpp"
#include "cuda/open.hpp"
#include "device/sources.hpp"
#include "kernels/relu/relu.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "verify/verifier.hpp"

using namespace fftune;

namespace {

Problem relu_problem(DType dtype, std::int64_t m, std::int64_t d) {
  return {"relu", "fwd", dtype, {{"m", m}, {"d", d}}, {}};
}

SourceSet relu_sources() {
  std::ifstream file(FFTUNE_ASSEMBLED "/kernels/relu/relu_cuda.cu");
  REQUIRE(file);
  return SourceSet({{"relu/relu_cuda.cu", {std::istreambuf_iterator<char>(file), {}}}});
}

}  // namespace

TEST_CASE("every variant of the example is right on the CPU") {
  const Op& op = relu_op();
  const auto backend = open_cpu();
  const Family& family = family_of(op, "cpu_relu");
  for (const std::int64_t m : {std::int64_t{1}, std::int64_t{67}}) {
    const Problem problem = canonical(op, relu_problem(DType::f32, m, 33), DeviceKind::cpu);
    REQUIRE(recipe_text(default_recipe(op, problem, backend->facts())) ==
            "cpu_relu/rows=1,threads=1");
    Verifier verifier(*backend, op, problem, 1);
    const auto variants = family.space(problem, backend->facts()).feasible();
    REQUIRE_FALSE(variants.empty());
    for (const auto& config : variants) {
      const auto result = backend->compile(family.program(problem, backend->facts(), config));
      CAPTURE(config.text(), result.report.failure);
      REQUIRE(result.executable);
      const Verification verification = verifier.verify(0, 1, {result.executable});
      CAPTURE(verification.failure, verification.error);
      REQUIRE(verification.passed);
    }
  }
}

TEST_CASE("every variant of the example compiles for every architecture") {
  const SourceSet sources = relu_sources();
  const Family& family = family_of(relu_op(), "relu_cuda");
  const Problem problem = relu_problem(DType::bf16, 4096, 1024);
  for (const auto& arch : known_architectures()) {
    const DeviceFacts facts = facts_of_architecture(arch);
    REQUIRE_FALSE(family.refusal(problem, facts));
    REQUIRE(family.refusal(relu_problem(DType::bf16, 4096, 1023), facts));
    const auto variants = family.space(problem, facts).feasible();
    REQUIRE(variants.size() > 10);
    std::unique_ptr<Compiler> compiler;
    try {
      compiler = make_cuda_compiler(arch, sources, {});
    } catch (const Error& error) {
      REQUIRE(error.kind() == ErrorKind::unavailable);
      FFTUNE_SKIP(error.what());
    }
    for (const auto& config : {variants.front(), variants.back()}) {
      const CompileReport report = compiler->compile(family.program(problem, facts, config));
      CAPTURE(arch, config.text());
      REQUIRE(report.failure.empty());
      REQUIRE(report.spill_bytes() == 0);
    }
  }
}
