// Problems of rmsnorm for tests.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/rmsnorm/rmsnorm.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "verify/verifier.hpp"

namespace fftune::test {

inline Problem rmsnorm_problem(DeviceKind kind, const std::string& pass, DType dtype,
                               std::int64_t m, std::int64_t d,
                               std::map<std::string, std::string> options = {}) {
  return canonical(rmsnorm_op(), {"rmsnorm", pass, dtype, {{"m", m}, {"d", d}}, std::move(options)},
                   kind);
}

/// A problem with every field drawn; small ones are likely, and so are widths that are aligned.
template <typename Random>
Problem random_rmsnorm(DeviceKind kind, Random& random, std::int64_t most_elements) {
  const auto below = [&](std::int64_t bound) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(bound));
  };
  const auto pick = [&](const std::vector<std::string>& words) {
    return words[static_cast<std::size_t>(below(std::ssize(words)))];
  };
  std::int64_t d = 1 + below(std::int64_t{1} << (1 + below(16)));
  if (below(2)) d = (d + 7) / 8 * 8;
  d = std::min({d, rmsnorm::most_features, most_elements});
  const std::int64_t m = std::min(1 + below(std::int64_t{1} << (1 + below(8))),
                                  std::max<std::int64_t>(1, most_elements / d));
  const auto dtypes = rmsnorm_op().dtypes(kind);
  return rmsnorm_problem(kind, pick({"fwd", "bwd"}),
                         dtypes[static_cast<std::size_t>(below(std::ssize(dtypes)))], m, d,
                         {{"convention", pick({"llama", "gemma", "t5"})},
                          {"residual", pick({"no", "yes"})},
                          {"save", pick({"nothing", "rstd"})},
                          {"weights", pick({"same", "f32"})},
                          {"eps", pick({"1e-6", "1e-5", "0.1"})}});
}

/// Every family that serves the problem on the backend's device, by its default and by `more`
/// feasible configurations drawn at random: poisoned outputs, guards, the same bits twice, the
/// error. Returns how many variants were verified.
template <typename Random>
int verify_variants(Backend& backend, const Op& op, const Problem& problem, Random& random,
                    int more) {
  const DeviceFacts& facts = backend.facts();
  Verifier verifier(backend, op, problem, random());
  int verified = 0;
  for (const Family* family : op.families()) {
    if (family->device_kind() != facts.kind || family->refusal(problem, facts)) continue;
    const Space space = family->space(problem, facts);
    std::vector<Config> configs{family->default_config(problem, facts)};
    const auto feasible = more > 0 ? space.feasible() : std::vector<Config>{};
    for (int i = 0; i < more && !feasible.empty(); ++i)
      configs.push_back(feasible[random() % feasible.size()]);
    for (const Config& config : configs) {
      CAPTURE(problem.text(), family->name(), config.text());
      REQUIRE(space.violations(config).empty());
      const auto compiled = backend.compile(family->program(problem, facts, config));
      REQUIRE(compiled.report.failure == "");
      const auto result = verifier.verify(0, 1, {compiled.executable});
      CAPTURE(result.failure, result.error, result.tolerance);
      REQUIRE(result.passed);
      ++verified;
    }
  }
  return verified;
}

}  // namespace fftune::test
