// Random problems against the float64 reference, on every family of a device; and the CUDA spaces.
#include <algorithm>
#include <random>
#include <vector>

#include "cpu/open.hpp"
#include "cuda/launch_limits.hpp"
#include "kernels/act_mul/act_mul.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

template <typename Random>
Problem random_problem(DeviceKind kind, Random& random, std::int64_t most_elements) {
  const auto below = [&](std::int64_t bound) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(bound));
  };
  std::int64_t h = 1 + below(std::int64_t{1} << (1 + below(16)));
  if (below(2)) h = (h + 7) / 8 * 8;
  h = std::min(h, most_elements);
  const std::int64_t m = std::min(1 + below(std::int64_t{1} << (1 + below(9))),
                                  std::max<std::int64_t>(1, most_elements / h));
  const auto dtypes = act_mul_op().dtypes(kind);
  const auto acts = act_mul_op().options().front().choices;
  return canonical(act_mul_op(),
                   {"act-mul",
                    below(2) ? "bwd" : "fwd",
                    dtypes[static_cast<std::size_t>(below(std::ssize(dtypes)))],
                    {{"m", m}, {"h", h}},
                    {{"act", acts[static_cast<std::size_t>(below(std::ssize(acts)))]},
                     {"packed", below(2) ? "yes" : "no"}}},
                   kind);
}

}  // namespace

TEST_CASE("ten thousand small random problems are right on the CPU") {
  const auto backend = open_cpu();
  std::mt19937_64 random(1);
  for (int i = 0; i < 10000; ++i) {
    const Problem problem = random_problem(DeviceKind::cpu, random, 600);
    REQUIRE(verify_variants(*backend, act_mul_op(), problem, random, i % 4 == 0 ? 1 : 0) > 0);
  }
}

TEST_CASE("larger random problems are right on the CPU") {
  const auto backend = open_cpu();
  std::mt19937_64 random(2);
  for (int i = 0; i < 60; ++i)
    REQUIRE(verify_variants(*backend, act_mul_op(),
                            random_problem(DeviceKind::cpu, random, 1 << 17), random, 3) > 0);
}

TEST_CASE("500 random problems are right on the GPU", "[gpu]") {
  const auto backend = open_first_cuda();
  if (!backend) FFTUNE_SKIP("there is no CUDA device here");
  std::mt19937_64 random(3);
  for (int i = 0; i < 500; ++i) {
    const auto most = std::int64_t{1} << (i % 10 == 0 ? 20 : 14);
    const Problem problem = random_problem(DeviceKind::cuda, random, most);
    REQUIRE(verify_variants(*backend, act_mul_op(), problem, random, 1) > 0);
  }
}

TEST_CASE("every CUDA family has a space with its default in it, and legal launches") {
  std::mt19937_64 random(4);
  for (int i = 0; i < 400; ++i) {
    const auto facts = facts_of_architecture(known_architectures()[random() % 6]);
    const Problem problem = random_problem(DeviceKind::cuda, random, std::int64_t{1} << 32);
    int served = 0;
    for (const Family* family : act_mul_op().families()) {
      if (family->device_kind() != DeviceKind::cuda || family->refusal(problem, facts)) continue;
      CAPTURE(problem.text(), family->name(), facts.arch);
      const Config config = family->default_config(problem, facts);
      CAPTURE(config.text());
      CHECK(family->space(problem, facts).violations(config).empty());
      for (const auto& step : family->program(problem, facts, config).steps)
        CHECK(cuda::launch_failure(std::get<KernelLaunch>(step), {}, facts).empty());
      ++served;
    }
    CHECK(served == 2);
  }
}
