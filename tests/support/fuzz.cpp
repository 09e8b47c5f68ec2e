#include "support/fuzz.hpp"

namespace fftune::test {

Problem maybe_frozen(const Op& op, Problem problem, DeviceKind kind, Draw& draw) {
  if (problem.pass != "bwd" || draw.below(3) > 0) return problem;
  problem.options["frozen"] = "yes";
  return canonical(op, problem, kind);
}

void verify_small_on_cpu(const Op& op, DrawProblem problem, int count) {
  const auto backend = open_cpu();
  Draw draw(1);
  for (int i = 0; i < count; ++i)
    REQUIRE(verify_variants(*backend, op, problem(DeviceKind::cpu, draw, 600), draw.random(),
                            i % 4 == 0 ? 1 : 0) > 0);
}

void verify_larger_on_cpu(const Op& op, DrawProblem problem, int count) {
  const auto backend = open_cpu();
  Draw draw(2);
  for (int i = 0; i < count; ++i)
    REQUIRE(verify_variants(*backend, op, problem(DeviceKind::cpu, draw, 1 << 17), draw.random(),
                            3) > 0);
}

void verify_on_gpu(const Op& op, DrawProblem problem, int count, int most_bits,
                   std::uint64_t seed) {
  FFTUNE_FIRST_CUDA(backend);
  const DeviceFacts& facts = backend->facts();
  Draw draw(seed);
  struct Case {
    Problem problem;
    DrawnVariant variant;
    CompileResult compiled;
  };
  // Many at a time, because compiling them on one core is nearly all of the time that this takes.
  constexpr int at_once = 50;
  for (int first = 0; first < count; first += at_once) {
    std::vector<Case> cases;
    for (int i = first; i < std::min(first + at_once, count); ++i) {
      const Problem drawn = problem(DeviceKind::cuda, draw,
                                    std::int64_t{1} << (i % 10 == 0 ? most_bits : most_bits - 6));
      const auto variants = draw_variants(facts, op, drawn, draw.random(), 1);
      REQUIRE_FALSE(variants.empty());
      for (const auto& variant : variants) cases.push_back({drawn, variant, {}});
    }
    HostThreads threads;
    threads.run(static_cast<int>(cases.size()), threads.max_threads(), [&](int i) {
      auto& each = cases[static_cast<std::size_t>(i)];
      each.compiled =
          backend->compile(each.variant.family->program(each.problem, facts, each.variant.config));
    });
    std::optional<Verifier> verifier;
    for (const auto& each : cases) {
      if (!verifier || verifier->problem() != each.problem)
        verifier.emplace(*backend, op, each.problem, draw.random()());
      verify_variant(*verifier, each.variant, each.compiled);
    }
  }
}

void verify_small_on_gpu(const Op& op, DrawProblem problem) {
  verify_on_gpu(op, problem, 24, 13);
}

void check_cuda_spaces(const Op& op, DrawProblem draw_problem, int count) {
  Draw draw(4);
  for (int i = 0; i < count; ++i) {
    const auto facts = facts_of_architecture(draw.of(known_architectures()));
    const Problem problem = draw_problem(DeviceKind::cuda, draw, std::int64_t{1} << 30);
    const std::string stage = op.stages(problem).front().name;
    bool served = false;
    for (const Family* family : op.families()) {
      if (family->device_kind() != DeviceKind::cuda) continue;
      CAPTURE(problem.text(), family->name(), facts.arch);
      if (family->refusal(problem, facts)) {
        CHECK((family->stages().front() != stage || !family->is_fallback()));
        continue;
      }
      served = true;
      const Config config = family->default_config(problem, facts);
      CAPTURE(config.text());
      CHECK(family->space(problem, facts).violations(config).empty());
      for (const auto& step : family->program(problem, facts, config).steps)
        CHECK(cuda::launch_failure(std::get<KernelLaunch>(step), {}, facts).empty());
    }
    CHECK(served);
  }
}

}  // namespace fftune::test
