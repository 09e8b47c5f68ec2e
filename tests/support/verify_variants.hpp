// Verifying variants of an op on a device.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "registry/catalog.hpp"
#include "runtime/devices.hpp"
#include "runtime/environment.hpp"
#include "support/catch.hpp"
#include "verify/verifier.hpp"

namespace fftune::test {

/// The first CUDA device, or null where there is none.
inline std::unique_ptr<Backend> open_first_cuda() {
  const Environment environment = read_environment();
  const auto devices = list_devices(environment);
  const auto cuda =
      std::find_if(devices.found.begin(), devices.found.end(),
                   [](const auto& device) { return device.facts.kind == DeviceKind::cuda; });
  if (cuda == devices.found.end()) return nullptr;
  return open_device(cuda->spec, *builtin_catalog().sources, environment);
}

/// Every family that serves the problem on the backend's device, by its default and by `more`
/// feasible configurations drawn at random, on the stages that it covers: poisoned outputs, guards,
/// the same bits twice, the error. Returns how many variants were verified.
template <typename Random>
int verify_variants(Backend& backend, const Op& op, const Problem& problem, Random& random,
                    int more) {
  const DeviceFacts& facts = backend.facts();
  Verifier verifier(backend, op, problem, random());
  const auto stages = op.stages(problem);
  int verified = 0;
  for (const Family* family : op.families()) {
    if (family->device_kind() != facts.kind || family->refusal(problem, facts)) continue;
    const auto own = family->stages();
    const auto first = std::find_if(stages.begin(), stages.end(),
                                    [&](const auto& stage) { return stage.name == own.front(); });
    REQUIRE(first != stages.end());
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
      const auto result = verifier.verify(static_cast<std::size_t>(first - stages.begin()),
                                          own.size(), {compiled.executable});
      CAPTURE(result.failure, result.error, result.tolerance);
      REQUIRE(result.passed);
      ++verified;
    }
  }
  return verified;
}

/// The recipe on all of the op's stages: what one stage writes is what the next one reads.
inline void verify_recipe(Backend& backend, const Op& op, const Problem& problem,
                          const Recipe& recipe, std::uint64_t seed) {
  CAPTURE(problem.text(), recipe_text(recipe));
  Verifier::Executables executables;
  for (const Variant& variant : recipe) {
    const Family& family = family_of(op, variant.family);
    const auto compiled = backend.compile(family.program(problem, backend.facts(), variant.config));
    REQUIRE(compiled.report.failure == "");
    executables.push_back(compiled.executable);
  }
  Verifier verifier(backend, op, problem, seed);
  const auto result = verifier.verify(0, op.stages(problem).size(), executables);
  CAPTURE(result.failure, result.error, result.tolerance);
  REQUIRE(result.passed);
}

}  // namespace fftune::test
