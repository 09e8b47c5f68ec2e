#include "support/verify_variants.hpp"

namespace fftune::test {

std::unique_ptr<Backend> open_first_cuda() {
  const Environment environment = read_environment();
  const auto devices = list_devices(environment);
  const auto cuda =
      std::find_if(devices.found.begin(), devices.found.end(),
                   [](const auto& device) { return device.facts.kind == DeviceKind::cuda; });
  if (cuda == devices.found.end()) return nullptr;
  return open_device(cuda->spec, *builtin_catalog().sources, environment);
}

bool every_family(const Family&) {
  return true;
}

bool reads_packed_weights(const Family& family) {
  return family.name().find("packed") != std::string_view::npos;
}

std::size_t first_stage_of(const Family& family, const std::vector<StageSpec>& stages) {
  const auto own = family.stages();
  const auto first = std::find_if(stages.begin(), stages.end(),
                                  [&](const auto& stage) { return stage.name == own.front(); });
  REQUIRE(first != stages.end());
  return static_cast<std::size_t>(first - stages.begin());
}

std::vector<DrawnVariant> draw_variants(const DeviceFacts& facts, const Op& op,
                                        const Problem& problem, std::mt19937_64& random, int more,
                                        Chosen chosen) {
  std::vector<DrawnVariant> variants;
  for (const Family* family : op.families()) {
    if (family->device_kind() != facts.kind || !chosen(*family) || family->refusal(problem, facts))
      continue;
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

void verify_run(Verifier& verifier, const std::vector<DrawnVariant>& variants,
                const std::vector<CompileResult>& compiled) {
  Recipe recipe;
  Verifier::Executables executables;
  std::size_t stages = 0;
  for (std::size_t i = 0; i < variants.size(); ++i) {
    recipe.push_back({std::string(variants[i].family->name()), variants[i].config});
    executables.push_back(compiled[i].executable);
    stages += variants[i].stage_count;
  }
  CAPTURE(verifier.problem().text(), recipe_text(recipe));
  for (const CompileResult& each : compiled) {
    CHECK(each.report.failure == "");
    if (!each.report.failure.empty()) return;
  }
  const auto result = verifier.verify(variants.front().first_stage, stages, executables);
  CAPTURE(result.failure, result.error, result.tolerance);
  CHECK(result.passed);
}

void verify_variant(Verifier& verifier, const DrawnVariant& variant,
                    const CompileResult& compiled) {
  verify_run(verifier, {variant}, {compiled});
}

int verify_variants(Backend& backend, const Op& op, const Problem& problem, std::mt19937_64& random,
                    int more) {
  const DeviceFacts& facts = backend.facts();
  Verifier verifier(backend, op, problem, random());
  const auto variants = draw_variants(facts, op, problem, random, more);
  for (const auto& variant : variants)
    verify_variant(verifier, variant,
                   backend.compile(variant.family->program(problem, facts, variant.config)));
  return static_cast<int>(variants.size());
}

void verify_recipe(Backend& backend, const Op& op, const Problem& problem, const Recipe& recipe,
                   std::uint64_t seed) {
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

void verify_families(Backend& backend, const Op& op, const std::vector<Problem>& problems,
                     std::mt19937_64& random, int more, Chosen chosen) {
  struct Run {
    Problem problem;
    std::vector<DrawnVariant> variants;  // one after the other
    std::vector<CompileResult> compiled = {};
  };
  const DeviceFacts& facts = backend.facts();
  HostThreads threads;
  constexpr std::size_t at_once = 16;
  for (std::size_t first = 0; first < problems.size(); first += at_once) {
    std::vector<Run> runs;
    for (std::size_t i = first; i < std::min(first + at_once, problems.size()); ++i) {
      const Problem problem = canonical(op, problems[i], facts.kind);
      const auto variants = draw_variants(facts, op, problem, random, more, chosen);
      CAPTURE(problem.text());
      REQUIRE_FALSE(variants.empty());
      for (const DrawnVariant& variant : variants) runs.push_back({problem, {variant}});
      for (const Recipe& recipe :
           {default_recipe(op, problem, facts), fallback_recipe(op, problem, facts)}) {
        auto& all = runs.emplace_back(Run{problem, {}}).variants;
        for (const Variant& variant : recipe) {
          const Family& family = family_of(op, variant.family);
          all.push_back({&family, variant.config, first_stage_of(family, op.stages(problem)),
                         family.stages().size()});
        }
      }
    }
    threads.run(static_cast<int>(runs.size()), threads.max_threads(), [&](int i) {
      auto& [problem, variants, compiled] = runs[static_cast<std::size_t>(i)];
      for (const DrawnVariant& variant : variants)
        compiled.push_back(
            backend.compile(variant.family->program(problem, facts, variant.config)));
    });
    std::optional<Verifier> verifier;  // one for a problem, and so one reference
    for (const auto& [problem, variants, compiled] : runs) {
      if (!verifier || verifier->problem() != problem)
        verifier.emplace(backend, op, problem, random());
      verify_run(*verifier, variants, compiled);
    }
  }
}

}  // namespace fftune::test
