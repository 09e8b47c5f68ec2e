// Random problems of an op of one stage, and what must hold for each of them on every family.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/open.hpp"
#include "cuda/launch_limits.hpp"
#include "support/verify_variants.hpp"
#include "verify/host_threads.hpp"

namespace fftune::test {

/// Draws the fields of a problem.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}

  std::mt19937_64& random() { return random_; }
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(bound));
  }
  template <typename Value>
  Value of(const std::vector<Value>& values) {
    return values[static_cast<std::size_t>(below(std::ssize(values)))];
  }
  std::string of(std::initializer_list<const char*> words) {
    return words.begin()[below(std::ssize(words))];
  }
  /// From 1 to 2^most_bits, small ones likely.
  std::int64_t size(std::int64_t most_bits) {
    return 1 + below(std::int64_t{1} << (1 + below(most_bits)));
  }
  /// Rows and columns of at most `most_elements` together; columns are often a multiple of 8.
  std::pair<std::int64_t, std::int64_t> matrix(std::int64_t most_elements,
                                               std::int64_t most_columns = std::int64_t{1} << 20) {
    std::int64_t columns = size(16);
    if (below(2)) columns = (columns + 7) / 8 * 8;
    columns = std::min({columns, most_columns, most_elements});
    return {std::min(size(9), std::max<std::int64_t>(1, most_elements / columns)), columns};
  }

 private:
  std::mt19937_64 random_;
};

/// A backward pass, one in three of them without the gradients of weights.
inline Problem maybe_frozen(const Op& op, Problem problem, DeviceKind kind, Draw& draw) {
  if (problem.pass != "bwd" || draw.below(3) > 0) return problem;
  problem.options["frozen"] = "yes";
  return canonical(op, problem, kind);
}

/// A problem on a kind of device, of at most about that many elements.
using DrawProblem = Problem (*)(DeviceKind kind, Draw& draw, std::int64_t most_elements);

inline void verify_small_on_cpu(const Op& op, DrawProblem problem, int count = 10000) {
  const auto backend = open_cpu();
  Draw draw(1);
  for (int i = 0; i < count; ++i)
    REQUIRE(verify_variants(*backend, op, problem(DeviceKind::cpu, draw, 600), draw.random(),
                            i % 4 == 0 ? 1 : 0) > 0);
}

inline void verify_larger_on_cpu(const Op& op, DrawProblem problem, int count = 60) {
  const auto backend = open_cpu();
  Draw draw(2);
  for (int i = 0; i < count; ++i)
    REQUIRE(verify_variants(*backend, op, problem(DeviceKind::cpu, draw, 1 << 17), draw.random(),
                            3) > 0);
}

/// Every tenth problem has up to 2^`most_bits` elements, the others 2^6 times fewer.
inline void verify_on_gpu(const Op& op, DrawProblem problem, int count = 500, int most_bits = 20,
                          std::uint64_t seed = 3) {
  const auto backend = open_first_cuda();
  if (!backend) FFTUNE_SKIP("there is no CUDA device here");
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

/// Few and small enough to run under compute-sanitizer, ragged like the others.
inline void verify_small_on_gpu(const Op& op, DrawProblem problem) {
  verify_on_gpu(op, problem, 24, 13);
}

/// On architectures drawn at random: some CUDA family serves each problem, and every fallback of
/// its pass does; those that serve have their default in their space, and launches that the
/// hardware takes.
inline void check_cuda_spaces(const Op& op, DrawProblem draw_problem, int count = 400) {
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
