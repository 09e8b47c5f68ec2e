// Outputs whose bits may differ from run to run, and sums of what was rounded before.
#include <cmath>
#include <random>

#include "support/toy_op.hpp"
#include "verify/toy_run.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// The toy whose output may be added up in any order, and whose stages round what they sum.
class UnorderedToy : public ToyOp {
 public:
  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    auto tensors = ToyOp::tensors(problem);
    tensors[toy_y].any_order = any_order;
    return tensors;
  }
  std::vector<StageSpec> stages(const Problem& problem) const override {
    auto stages = ToyOp::stages(problem);
    for (auto& stage : stages) stage.inner_roundings = inner_roundings;
    return stages;
  }
  bool any_order = true;
  int inner_roundings = 0;
};

/// y of the toy's fused family, the last bit of its first element as `run` has it.
Program shaky_program(const Problem& problem, float by) {
  Program program = ToyFamily("fused", "", false).program(problem, {}, {{"block", 1}});
  auto run = std::make_shared<int>(0);
  program.steps.emplace_back(HostFunction([run, by](const HostCall& call) {
    float& first = static_cast<float*>(call.tensors[toy_y])[0];
    if ((*run)++ % 2 == 1) first += by;
  }));
  return program;
}

}  // namespace

TEST_CASE("bits may differ where sums have any order, but no second run may be wrong") {
  const auto backend = open_cpu();
  const Problem problem = UnorderedToy::problem(DType::f32, 8, 16, 16);
  const auto verify = [&](bool any_order, float by) {
    UnorderedToy op;
    op.any_order = any_order;
    Verifier verifier(*backend, op, problem, 1);
    const auto compiled = backend->compile(shaky_program(problem, by));
    return verifier.verify(0, 2, {compiled.executable});
  };
  CHECK_FALSE(verify(false, 1e-7F).passed);
  CHECK(verify(true, 1e-7F).passed);
  CHECK_FALSE(verify(true, 0.1F).passed);
}

TEST_CASE("what was rounded before it was summed widens the tolerance in squares") {
  HostThreads threads;
  const Problem problem = UnorderedToy::problem(DType::bf16, 40, 16, 16);
  const auto error = [&](int inner_roundings) {
    UnorderedToy op;
    op.inner_roundings = inner_roundings;
    Truth truth(op, problem, 1, threads);
    return truth.expected(1, toy_y).rounding_error;
  };
  CHECK(error(1) == Approx(std::sqrt(2.0) * error(0)));
}
