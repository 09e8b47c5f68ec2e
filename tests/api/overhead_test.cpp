// Host time of running a plan, besides the kernels.
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "api/layer.hpp"
#include "runtime/plan.hpp"
#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/host_backend.hpp"
#include "support/seconds.hpp"
#include "support/toy_op.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Microseconds of one call of a thousand.
template <typename Call>
double microseconds(const Call& call) {
  return 1e3 * processor_seconds_of([&] {
           for (int i = 0; i < 1000; ++i) call();
         });
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
  const double spent = least_time_of(3 * slowness, [&] { return microseconds(run); });
  WARN("Plan::run without its kernels: " << spent << " us");
  CHECK(spent < 3 * slowness);
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
  const auto run = [&] { plan.run(buffers.data(), buffers.size(), workspace.data()); };
  const double spent = least_time_of(1000, [&] { return microseconds(run); });
  WARN("fftune_plan_run of ffn m=d=h=1 on the CPU: " << spent << " us");
  CHECK(spent < 1000);
}
