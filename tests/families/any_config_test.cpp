// A user may ask for any values of a space's parameters: its constraints judge them all, also those
// that another constraint forbids.
#include <random>
#include <set>
#include <string>

#include "families/small_problems.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "support/each_op.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Draws configurations of every CUDA family that serves the problem: its space finds nothing wrong
/// with those that it lists, and something with each of the others.
void judge_any(const Op& op, const Problem& problem, const DeviceFacts& facts) {
  constexpr int draws = 100;
  for (const Family* family : op.families()) {
    if (family->device_kind() != DeviceKind::cuda || family->refusal(problem, facts)) continue;
    const Space space = family->space(problem, facts);
    const auto listed = space.feasible();
    const std::set<Config> feasible(listed.begin(), listed.end());
    std::mt19937 random(7);
    for (int i = 0; i < draws; ++i) {
      Config config;
      for (const Parameter& parameter : space.parameters())
        config.set(parameter.name, parameter.values[random() % parameter.values.size()]);
      CAPTURE(problem.text(), family->name(), config.text());
      CHECK(space.violations(config).empty() == feasible.contains(config));
    }
  }
}

void judge_examples(const Op& op) {
  for (const std::string& pass : op.passes())
    for (const DType dtype : op.dtypes_of_pass(DeviceKind::cuda, pass)) {
      const Problem problem = example_problem(op, pass, dtype);
      for (const char* architecture : {"sm_80", "sm_90a"})
        judge_any(op, unrepeated(op, canonical(op, problem, DeviceKind::cuda)),
                  facts_of_architecture(architecture));
    }
}

}  // namespace

FFTUNE_TEST_EACH_OP(judge_examples, "constraints judge any values of the parameters", "");

TEST_CASE("constraints judge tiles of more heads than rows") {
  const Op& op = builtin_catalog().op("attention");
  const Problem problem{"attention",
                        "fwd",
                        DType::bf16,
                        {{"b", 2}, {"s", 128}, {"heads", 128}, {"kv-heads", 1}, {"dim", 64}},
                        {{"mask", "causal"}}};
  judge_any(op, canonical(op, problem, DeviceKind::cuda), facts_of_architecture("sm_90a"));
}
