// A plan is refused for what it has to allocate itself, and for nothing else: its workspace, in
// which tensors share memory. The other tensors are there already, and some are one buffer.
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "families/small_problems.hpp"
#include "registry/catalog.hpp"
#include "runtime/choice.hpp"
#include "runtime/plan.hpp"
#include "runtime/token_plan.hpp"
#include "support/absent_backend.hpp"
#include "support/catch.hpp"
#include "support/each_op.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

constexpr double gibibyte = std::int64_t{1} << 30;

/// An H200 with this memory.
DeviceFacts device_with(std::size_t bytes) {
  auto facts = facts_of_architecture("sm_90a");
  facts.memory_bytes = static_cast<std::int64_t>(bytes);
  return facts;
}

/// The workspace of the problem's plan on a device with this memory; nothing if it is refused.
std::optional<std::size_t> workspace_on(const Problem& problem, std::size_t memory) {
  const Catalog& catalog = builtin_catalog();
  const Op& op = catalog.op(problem.op);
  AbsentBackend backend(device_with(memory));
  const Recipe recipe = choose(catalog, op, problem, backend.facts(), {}).recipe;
  try {
    return Plan(backend, op, problem, recipe).workspace_bytes();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::unavailable ||
        std::string(error.what()).find("the workspace of") != 0)
      throw;
    return std::nullopt;
  }
}

constexpr std::size_t boundless = std::size_t{1} << 60;

double tensor_bytes(const Problem& problem) {
  double bytes = 0;
  for (const TensorSpec& tensor : builtin_catalog().op(problem.op).tensors(problem))
    bytes += static_cast<double>(tensor.bytes());
  return bytes;
}

Problem canonical_of(const Problem& problem) {
  return canonical(builtin_catalog().op(problem.op), problem, DeviceKind::cuda);
}

void needs_its_workspace_alone(const Op& op) {
  int plans = 0;
  for (const std::string& pass : op.passes())
    for (const Options& options : forms_of(op, pass)) {
      const DType dtype = op.dtypes_of_pass(DeviceKind::cuda, pass).front();
      const Problem given = example_problem(op, pass, dtype, options);
      std::optional<std::size_t> needed;
      Problem problem;
      try {
        problem = canonical_of(given);
        needed = workspace_on(problem, boundless);
      } catch (const Error&) {
        continue;  // fields that do not go together, or a form that needs a group
      }
      CAPTURE(problem.text(), *needed);
      ++plans;
      const std::size_t memory = std::max<std::size_t>(*needed, 1);
      CHECK(workspace_on(problem, memory) == needed);
      if (*needed > 1) CHECK_FALSE(workspace_on(problem, memory - 1));
    }
  REQUIRE(plans > 0);
}
FFTUNE_TEST_EACH_OP(needs_its_workspace_alone, "a plan is refused for its workspace alone", "");

struct LargePlan {
  const char* name;
  Problem problem;
  double tensors, most;  // GiB of all tensors at least, and of the workspace at most
};

std::vector<LargePlan> large_plans() {
  const std::map<std::string, std::int64_t> llama_8b{{"d", 4096},     {"h", 14336}, {"heads", 32},
                                                     {"kv-heads", 8}, {"dim", 128}, {"layers", 32}};
  auto prompt = llama_8b, server = llama_8b;
  prompt.insert({{"batch", 1}, {"s", 8192}, {"cache", 8192}});
  // 120 GB of pages, each of which has keys and values, and is seen as keys and as values.
  server.insert({{"batch", 16}, {"cache", 2048}, {"page", 16}, {"pages", 114441}});
  return {
      {"a prompt of Llama-3.1-8B", {"layer", "fwd", DType::bf16, prompt, {}}, 32, 2},
      {"pages of most of a GPU", {"layer", "fwd", DType::bf16, server, {}}, 250e9 / gibibyte, 0.1},
      {"the loss of all ids",
       {"linear-cross-entropy",
        "bwd",
        DType::bf16,
        {{"m", 65536}, {"d", 4096}, {"vocab", 131072}},
        {}},
       32,
       4},
      {"a residual that may be the sum",
       {"rmsnorm",
        "fwd",
        DType::bf16,
        {{"m", std::int64_t{1} << 21}, {"d", 8192}},
        {{"residual", "yes"}}},
       96,
       0.01},
      {"gradients that are added to others",
       {"linear",
        "bwd",
        DType::bf16,
        {{"m", 1024}, {"k", 131072}, {"n", 131072}},
        {{"accumulate", "yes"}}},
       96,
       1},
  };
}

}  // namespace

TEST_CASE("plans whose callers' tensors are larger than the device's memory are made") {
  for (const LargePlan& each : large_plans()) {
    CAPTURE(each.name);
    const Problem problem = canonical_of(each.problem);
    CHECK(tensor_bytes(problem) > each.tensors * gibibyte);
    const auto needed = workspace_on(problem, static_cast<std::size_t>(each.most * gibibyte));
    REQUIRE(needed);
    CAPTURE(*needed);
    CHECK(static_cast<double>(*needed) <= each.most * gibibyte);
  }
}

TEST_CASE("a plan for any number of tokens is refused for its workspace alone") {
  const Op& op = builtin_catalog().op("linear-cross-entropy");
  const Problem most = canonical_of({"linear-cross-entropy",
                                     "fwd",
                                     DType::bf16,
                                     {{"m", 256}, {"d", 4096}, {"vocab", 131072}},
                                     {}});
  const auto workspace = [&](std::size_t memory) {
    AbsentBackend backend(device_with(memory));
    return TokenPlan(builtin_catalog(), backend, op, most, {}).workspace_bytes();
  };
  const std::size_t needed = workspace(boundless);
  CHECK(static_cast<double>(needed) < 1 * gibibyte);
  CHECK(workspace(needed) == needed);
  CHECK_THROWS_AS(workspace(needed - 1), Error);
}
