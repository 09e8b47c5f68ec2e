// Outputs whose bits may differ from run to run, and sums of what was rounded before.
#include <cmath>

#include "support/catch.hpp"
#include "verify/host_threads.hpp"
#include "verify/toy_run.hpp"
#include "verify/truth.hpp"

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
    for (auto& stage : stages) {
      stage.inner_roundings = inner_roundings;
      stage.inner_values = inner_values;
    }
    return stages;
  }
  bool any_order = true;
  int inner_roundings = 0;
  double inner_values = 0;
};

}  // namespace

TEST_CASE("bits may differ where sums have any order, but no second run may be wrong") {
  HostBackend backend;
  const Problem problem = UnorderedToy::problem(DType::f32, 8, 16, 16);
  const auto verify = [&](bool any_order, float by) {
    UnorderedToy op;
    op.any_order = any_order;
    int runs = 0;
    const auto stage = toy_stage(problem, 1, [&](void* const* tensors, void*) {
      if (runs++ % 2 == 1) static_cast<float*>(tensors[toy_y])[0] += by;
    });
    return Verifier(backend, op, problem, 1).verify(1, 1, {stage});
  };
  CHECK_FALSE(verify(false, 1e-7F).passed);
  CHECK(verify(true, 1e-7F).passed);
  CHECK_FALSE(verify(true, 0.1F).passed);
}

TEST_CASE("summands rounded before the sum widen the tolerance in squares") {
  HostThreads threads;
  const Problem problem = UnorderedToy::problem(DType::bf16, 40, 16, 16);
  const auto error = [&](int inner_roundings, double inner_values = 0) {
    UnorderedToy op;
    op.inner_roundings = inner_roundings;
    op.inner_values = inner_values;
    Truth truth(op, problem, 1, threads);
    return truth.expected(1, toy_y).rounding_error;
  };
  // 640 elements may cancel to a tenth more than their usual size.
  CHECK(error(1) == Approx(std::hypot(1, 1.1) * error(0)));
  CHECK(error(1, 1e9) == error(1));
  // One value that outweighs all others may have the worst error, and so may a sum moved by it.
  CHECK(error(1, 1) == Approx(std::hypot(1, 1.1) * dtype_unit_roundoff(DType::bf16)));
  CHECK(error(0, 1) == error(0));
}
