// The time that the host takes for a new plan, up to the compiler: nothing may grow with the square
// of the layers, and a server whose batches change makes many.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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

struct PlanTime {
  double choice = 1e9, plan = 1e9;  // seconds
};

/// The shortest times of four plans for new numbers of rows, `rows` and a few more.
PlanTime time_of_new_rows(Problem problem, std::int64_t rows) {
  const Op& op = builtin_catalog().op(problem.op);
  Absent backend(facts_of_architecture("sm_90a"));
  PlanTime least;
  for (std::int64_t more = 0; more < 4; ++more) {
    const double begin = seconds_of_process();
    problem.sizes[std::string(op.token_size())] = rows + more;
    const Problem whole = canonical(op, problem, DeviceKind::cuda);
    const Choice choice = choose(builtin_catalog(), op, whole, backend.facts(), {});
    const double chosen = seconds_of_process();
    const Plan plan(backend, op, whole, choice.recipe);
    least.choice = std::min(least.choice, chosen - begin);
    least.plan = std::min(least.plan, seconds_of_process() - chosen);
  }
  return least;
}

/// The ops of vLLM's batches, with the sizes of Qwen3-30B-A3B and Llama-3.1-8B, and the most
/// milliseconds that a plan may take: several times as long as measured on one core of a Xeon.
struct NewRows {
  const char* name;
  Problem problem;
  double most;
};
const std::vector<NewRows>& new_rows() {
  static const std::vector<NewRows> all{
      {"moe-ffn",
       {"moe-ffn",
        "fwd",
        DType::bf16,
        {{"d", 2048}, {"h", 768}, {"experts", 128}, {"top-k", 8}},
        {}},
       2.5},
      {"moe-ffn int4",
       {"moe-ffn",
        "fwd",
        DType::bf16,
        {{"d", 2048}, {"h", 768}, {"experts", 128}, {"top-k", 8}},
        {{"weights", "int4"}}},
       1.2},
      {"qkv",
       {"qkv", "fwd", DType::bf16, {{"d", 2048}, {"heads", 32}, {"kv-heads", 4}, {"dim", 128}}, {}},
       0.8},
      {"attention",
       {"attention",
        "fwd",
        DType::bf16,
        {{"b", 16}, {"heads", 32}, {"kv-heads", 4}, {"dim", 128}, {"kv", 4096}, {"page", 16}},
        {{"layout", "thd"}, {"mask", "causal"}, {"lengths", "yes"}}},
       0.5},
      {"linear",
       {"linear", "fwd", DType::bf16, {{"k", 4096}, {"n", 2048}}, {{"residual", "yes"}}},
       1},
      {"ffn", {"ffn", "fwd", DType::bf16, {{"d", 4096}, {"h", 14336}}, {}}, 1.5},
      {"rmsnorm", {"rmsnorm", "fwd", DType::bf16, {{"d", 4096}}, {}}, 0.3},
  };
  return all;
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

TEST_CASE("the host makes a plan for a new number of rows in a few milliseconds", "[timing]") {
  for (const NewRows& each : new_rows())
    for (const std::int64_t rows : {16, 300, 4000}) {
      const PlanTime time = time_of_new_rows(each.problem, rows);
      CAPTURE(each.name, rows, time.choice, time.plan);
      CHECK(1e3 * (time.choice + time.plan) < each.most);
    }
}

TEST_CASE("a table of the times of plans for new numbers of rows, choice + rest", "[.][table]") {
  std::string table = "milliseconds";
  const auto counts = {1, 16, 64, 256, 1024, 4096, 8192};
  for (const std::int64_t rows : counts) table += fmt::format("{:>11}", rows);
  for (const NewRows& each : new_rows()) {
    table += fmt::format("\n{:12}", each.name);
    for (const std::int64_t rows : counts) {
      const PlanTime time = time_of_new_rows(each.problem, rows);
      table += fmt::format("  {:.2f}+{:.2f}", 1e3 * time.choice, 1e3 * time.plan);
    }
  }
  std::puts(table.c_str());
}
