// The time that the host takes for a new plan, up to the compiler: nothing may grow with the square
// of the layers, and a server whose batches change makes many.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "runtime/choice.hpp"
#include "runtime/plan.hpp"
#include "support/absent_backend.hpp"
#include "support/catch.hpp"
#include "support/seconds.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Seconds of a plan of a problem that was not asked for before, so that nothing is known of it.
double seconds_of_plan(const std::string& op_name, std::int64_t layers) {
  static std::int64_t plans = 0;
  const Op& op = builtin_catalog().op(op_name);
  AbsentBackend backend(facts_of_architecture("sm_90a"));
  Problem problem{op_name,
                  "fwd",
                  DType::bf16,
                  {{"batch", 16},
                   {"d", 2048},
                   {"h", 8192},
                   {"heads", 32},
                   {"kv-heads", 8},
                   {"dim", 64},
                   {"cache", 2048 + 64 * plans++},
                   {"layers", layers}},
                  {}};
  if (op_name == "decode") problem.sizes["vocab"] = 128256;
  return processor_seconds_of([&] {
    problem = canonical(op, problem, DeviceKind::cuda);
    const Plan plan(backend, op, problem,
                    choose(builtin_catalog(), op, problem, backend.facts(), {}).recipe);
    CHECK(plan.executables().size() >= static_cast<std::size_t>(layers));
  });
}

/// Seconds of choosing a recipe and making its plan for a number of rows that was not asked for
/// before.
double seconds_of_new_rows(Problem problem, std::int64_t rows) {
  const Op& op = builtin_catalog().op(problem.op);
  AbsentBackend backend(facts_of_architecture("sm_90a"));
  return processor_seconds_of([&] {
    problem.sizes[std::string(op.token_size())] = rows;
    const Problem whole = canonical(op, problem, DeviceKind::cuda);
    const Plan plan(backend, op, whole,
                    choose(builtin_catalog(), op, whole, backend.facts(), {}).recipe);
  });
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
    const double one = least_time_of(
        0, [&] { return seconds_of_plan(op, 1); }, 4);
    const double most = std::min(3 * one, 0.1 * slowness);
    CAPTURE(one);
    CHECK(least_time_of(most, [&] { return seconds_of_plan(op, 32); }) < most);
  }
}

TEST_CASE("the host makes a plan for a new number of rows in a few milliseconds", "[timing]") {
  for (const NewRows& each : new_rows())
    for (std::int64_t rows : {16, 300, 4000}) {
      CAPTURE(each.name, rows);
      const double most = 1e-3 * each.most * slowness;
      CHECK(least_time_of(most, [&] { return seconds_of_new_rows(each.problem, rows++); }) < most);
    }
}
