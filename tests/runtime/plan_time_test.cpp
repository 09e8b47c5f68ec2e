// The time that the host takes for a new plan, up to the compiler: nothing may grow with the square
// of the layers.
#include <algorithm>
#include <ctime>
#include <memory>
#include <string>

#include "registry/catalog.hpp"
#include "runtime/choice.hpp"
#include "runtime/plan.hpp"
#include "support/catch.hpp"
#include "support/host_backend.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// A device whose programs are all compiled at once, to nothing.
class Absent final : public HostBackend {
 public:
  explicit Absent(DeviceFacts facts) : facts_(std::move(facts)) {}
  const DeviceFacts& facts() const override { return facts_; }
  CompileResult compile(const Program&) override {
    return {std::make_shared<HostExecutable>([](void* const*, void*) {}), {}};
  }

 private:
  DeviceFacts facts_;
};

double seconds_of_process() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// The shortest of a few new plans, each of another problem, so that nothing is known of it yet.
double seconds_of_plan(const std::string& op_name, std::int64_t layers) {
  const Op& op = builtin_catalog().op(op_name);
  Absent backend(facts_of_architecture("sm_90a"));
  double least = 1e9;
  for (int i = 0; i < 4; ++i) {
    Problem problem{op_name,
                    "fwd",
                    DType::bf16,
                    {{"batch", 16},
                     {"d", 2048},
                     {"h", 8192},
                     {"heads", 32},
                     {"kv-heads", 8},
                     {"dim", 64},
                     {"cache", 2048 + 64 * i},
                     {"layers", layers}},
                    {}};
    if (op_name == "decode") problem.sizes["vocab"] = 128256;
    const double begin = seconds_of_process();
    problem = canonical(op, problem, DeviceKind::cuda);
    const Plan plan(backend, op, problem,
                    choose(builtin_catalog(), op, problem, backend.facts(), {}).recipe);
    least = std::min(least, seconds_of_process() - begin);
    CHECK(plan.executables().size() >= static_cast<std::size_t>(layers));
  }
  return least;
}

}  // namespace

TEST_CASE("the host makes a plan of 32 layers in some milliseconds", "[timing]") {
  for (const char* op : {"layer", "decode"}) {
    CAPTURE(op);
    const double one = seconds_of_plan(op, 1), all = seconds_of_plan(op, 32);
    CAPTURE(one, all);
    CHECK(all < 3 * one);
    CHECK(all < 0.1);
  }
}
