// Verifying variants of an op of one stage on a device.
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
};

/// Of every family that serves the problem, the default and `more` feasible configurations.
template <typename Random>
std::vector<DrawnVariant> draw_variants(const DeviceFacts& facts, const Op& op,
                                        const Problem& problem, Random& random, int more) {
  std::vector<DrawnVariant> variants;
  for (const Family* family : op.families()) {
    if (family->device_kind() != facts.kind || family->refusal(problem, facts)) continue;
    const Space space = family->space(problem, facts);
    variants.push_back({family, family->default_config(problem, facts)});
    CAPTURE(problem.text(), family->name(), variants.back().config.text());
    REQUIRE(space.violations(variants.back().config).empty());
    const auto feasible = more > 0 ? space.feasible() : std::vector<Config>{};
    for (int i = 0; i < more && !feasible.empty(); ++i)
      variants.push_back({family, feasible[random() % feasible.size()]});
  }
  return variants;
}

/// Poisoned outputs, guards, the same bits twice, the error.
inline void verify_variant(Verifier& verifier, const DrawnVariant& variant,
                           const CompileResult& compiled) {
  CAPTURE(verifier.problem().text(), variant.family->name(), variant.config.text());
  REQUIRE(compiled.report.failure == "");
  const auto result = verifier.verify(0, 1, {compiled.executable});
  CAPTURE(result.failure, result.error, result.tolerance);
  REQUIRE(result.passed);
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

}  // namespace fftune::test
