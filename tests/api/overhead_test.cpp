// Host time of running a plan, besides the kernels.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "api/allocations.hpp"
#include "api/layer.hpp"
#include "runtime/plan.hpp"
#include "support/catch.hpp"
#include "support/host_backend.hpp"
#include "support/toy_op.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// The least microseconds of one call, over batches of a thousand.
template <typename Call>
double microseconds(const Call& call) {
  double best = 1e9;
  for (int batch = 0; batch < 20; ++batch) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 1000; ++i) call();
    const std::chrono::duration<double, std::micro> spent =
        std::chrono::steady_clock::now() - start;
    best = std::min(best, spent.count() / 1000);
  }
  return best;
}

/// Compiles every program to nothing.
class IdleBackend final : public HostBackend {
 public:
  CompileResult compile(const Program&) override {
    return {std::make_shared<HostExecutable>([](void* const*, void*) {}), {}};
  }
};

}  // namespace

TEST_CASE("a plan's own part of a run allocates nothing and takes well below a microsecond") {
  IdleBackend backend;
  const ToyOp op;
  const Plan plan(backend, op, ToyOp::problem(DType::f32, 1, 4, 4),
                  {{"toy_first", {{"block", 1}}}, {"toy_second", {{"block", 1}}}});
  void* buffers[4] = {};
  std::vector<std::byte> workspace(plan.workspace_bytes());
  const auto run = [&] { plan.run(buffers, workspace.data(), nullptr); };
  const auto before = allocations();
  run();
  CHECK(allocations() == before);
  const double spent = microseconds(run);
  WARN("Plan::run without its kernels: " << spent << " us");
  CHECK(spent < 3);
}

TEST_CASE("refusing an argument allocates nothing") {
  const auto owner = cpu_context().plan(ffn_json(4, 16, 24));
  void* buffers[5] = {};
  const auto before = allocations();
  CHECK(fftune_plan_run(owner.get(), buffers, 5, nullptr, nullptr) == FFTUNE_INVALID_INPUT);
  CHECK(fftune_plan_run(owner.get(), buffers, 2, nullptr, nullptr) == FFTUNE_INVALID_INPUT);
  CHECK(allocations() == before);
}

TEST_CASE("the smallest problem shows the whole cost of a run on the CPU") {
  Layer layer(1, 1, 1);
  const auto plan = cpu_context().plan(ffn_json(1, 1, 1));
  HostWorkspace workspace(plan);
  const auto buffers = layer.buffers();
  const double spent =
      microseconds([&] { plan.run(buffers.data(), buffers.size(), workspace.data()); });
  WARN("fftune_plan_run of ffn m=d=h=1 on the CPU: " << spent << " us");
  CHECK(spent < 1000);
}
