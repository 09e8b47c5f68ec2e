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

/// A variant to verify.
struct DrawnVariant {
  const Family* family;
  Config config;
  std::size_t first_stage, stage_count;
};

/// The place of the family's first stage, which has to be there, among a problem's.
inline std::size_t first_stage_of(const Family& family, const std::vector<StageSpec>& stages) {
  const auto own = family.stages();
  const auto first = std::find_if(stages.begin(), stages.end(),
                                  [&](const auto& stage) { return stage.name == own.front(); });
  REQUIRE(first != stages.end());
  return static_cast<std::size_t>(first - stages.begin());
}

/// The default and `more` feasible configurations of every family that serves the problem on the
/// stages that it covers.
template <typename Random>
std::vector<DrawnVariant> draw_variants(const DeviceFacts& facts, const Op& op,
                                        const Problem& problem, Random& random, int more) {
  std::vector<DrawnVariant> variants;
  for (const Family* family : op.families()) {
    if (family->device_kind() != facts.kind || family->refusal(problem, facts)) continue;
    const std::size_t first_stage = first_stage_of(*family, op.stages(problem));
    const Space space = family->space(problem, facts);
    variants.push_back(
        {family, family->default_config(problem, facts), first_stage, family->stages().size()});
    CAPTURE(problem.text(), family->name(), variants.back().config.text());
    REQUIRE(space.violations(variants.back().config).empty());
    const auto feasible = more > 0 ? space.feasible() : std::vector<Config>{};
    for (int i = 0; i < more && !feasible.empty(); ++i)
      variants.push_back(
          {family, feasible[random() % feasible.size()], first_stage, family->stages().size()});
  }
  return variants;
}

/// Poisoned outputs, guards, the same bits twice, the error. A failure does not end the test, so
/// that one run on a device shows all.
inline void verify_variant(Verifier& verifier, const DrawnVariant& variant,
                           const CompileResult& compiled) {
  CAPTURE(verifier.problem().text(), variant.family->name(), variant.config.text());
  CHECK(compiled.report.failure == "");
  if (!compiled.report.failure.empty()) return;
  const auto result =
      verifier.verify(variant.first_stage, variant.stage_count, {compiled.executable});
  CAPTURE(result.failure, result.error, result.tolerance);
  CHECK(result.passed);
}

/// Draws, compiles and verifies; returns how many variants there were.
template <typename Random>
int verify_variants(Backend& backend, const Op& op, const Problem& problem, Random& random,
                    int more) {
  const DeviceFacts& facts = backend.facts();
  Verifier verifier(backend, op, problem, random());
  const auto variants = draw_variants(facts, op, problem, random, more);
  for (const auto& variant : variants)
    verify_variant(verifier, variant,
                   backend.compile(variant.family->program(problem, facts, variant.config)));
  return static_cast<int>(variants.size());
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
