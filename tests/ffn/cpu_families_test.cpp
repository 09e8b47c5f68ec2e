#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "cpu/open.hpp"
#include "ffn/problems.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/ffn/ffn.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "verify/verifier.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

std::vector<const Family*> cpu_families() {
  std::vector<const Family*> families;
  for (const auto* family : ffn_op().families())
    if (family->device_kind() == DeviceKind::cpu) families.push_back(family);
  return families;
}

/// Verifies a configuration of a family: poisoned outputs, guards, the same bits twice, the error.
void require_right(Backend& backend, Verifier& verifier, const Family& family,
                   const Problem& problem, const Config& config) {
  CAPTURE(problem.text(), family.name(), config.text());
  REQUIRE(family.space(problem, backend.facts()).violations(config).empty());
  const auto result = backend.compile(family.program(problem, backend.facts(), config));
  REQUIRE(result.report.failure == "");
  const auto verification = verifier.verify(0, 2, {result.executable});
  CAPTURE(verification.failure, verification.error, verification.tolerance);
  REQUIRE(verification.passed);
}

/// Verifies configs(space) of each CPU family that serves the problem; returns how many do.
template <class Configs>
int require_all_right(Backend& backend, const Problem& problem, std::uint64_t seed,
                      const Configs& configs) {
  Verifier verifier(backend, ffn_op(), problem, seed);
  int served = 0;
  for (const auto* family : cpu_families()) {
    if (family->refusal(problem, backend.facts())) continue;
    ++served;
    for (const auto& config : configs(*family))
      require_right(backend, verifier, *family, problem, config);
  }
  return served;
}

}  // namespace

TEST_CASE("every CPU family is right at ragged sizes, with every activation and dtype") {
  const auto backend = open_cpu();
  std::mt19937 random(1);
  for (const auto dtype : ffn_op().dtypes(DeviceKind::cpu))
    for (const auto& act : activation_names())
      for (const auto& [m, d, h] : {std::tuple{1, 1, 1},
                                    {1, 33, 71},
                                    {7, 17, 13},
                                    {40, 5, 3},
                                    {17, 40, 101},
                                    {37, 129, 65}}) {
        const auto problem = ffn_problem(DeviceKind::cpu, dtype, m, d, h, {{"act", act}});
        require_all_right(*backend, problem, random(), [&](const Family& family) {
          return std::vector{family.default_config(problem, backend->facts())};
        });
      }
}

TEST_CASE("every feasible variant of the CPU families runs right") {
  const auto backend = open_cpu();
  for (const auto dtype : ffn_op().dtypes(DeviceKind::cpu))
    for (const auto& [m, d, h] : {std::tuple{5, 30, 70}, {135, 24, 150}}) {
      const auto problem = ffn_problem(DeviceKind::cpu, dtype, m, d, h);
      require_all_right(*backend, problem, 3, [&](const Family& family) {
        return family.space(problem, backend->facts()).feasible();
      });
    }
}

TEST_CASE("every form is right in every variant of the families that have it") {
  const auto backend = open_cpu();
  for (const auto& form : forward_forms) {
    if (form.empty()) continue;  // more families have the plain one
    for (const auto dtype : ffn_op().dtypes(DeviceKind::cpu))
      for (const auto& [m, d, h] : {std::tuple{3, 30, 70}, {70, 24, 150}}) {
        const auto problem = ffn_problem(DeviceKind::cpu, dtype, m, d, h, form);
        REQUIRE(require_all_right(*backend, problem, 11, [&](const Family& family) {
                  return family.space(problem, backend->facts()).feasible();
                }) == (dtype == DType::fp8 ? 1 : 2));
      }
  }
}

TEST_CASE("fp8 with scales of blocks is right in every form, at sizes that no block divides") {
  const auto backend = open_cpu();
  for (auto form : forward_forms)
    for (const auto& [m, d, h] : {std::tuple{1, 1, 1}, {3, 130, 70}, {70, 256, 300}}) {
      form["scales"] = "block";
      const auto problem = ffn_problem(DeviceKind::cpu, DType::fp8, m, d, h, form);
      REQUIRE(require_all_right(*backend, problem, 12, [&](const Family& family) {
                return std::vector{family.default_config(problem, backend->facts())};
              }) == 1);
    }
}

TEST_CASE("the blocks of large problems are right too") {
  const auto backend = open_cpu();
  for (const auto dtype : ffn_op().dtypes(DeviceKind::cpu))
    for (const auto& [m, d, h] : {std::tuple{130, 300, 520}, {16, 520, 1100}}) {
      const auto problem = ffn_problem(DeviceKind::cpu, dtype, m, d, h);
      require_all_right(*backend, problem, 5, [&](const Family& family) {
        std::vector<Config> fifth;
        if (family.is_fallback()) return fifth;
        const auto feasible = family.space(problem, backend->facts()).feasible();
        for (std::size_t i = 0; i < feasible.size(); i += 5) fifth.push_back(feasible[i]);
        return fifth;
      });
    }
}

TEST_CASE("spaces are never empty and defaults are feasible, whatever the problem and cores") {
  std::mt19937_64 random(7);
  const auto size = [&](int bits) {
    return static_cast<std::int64_t>(1 + random() % (1u << (1 + random() % bits)));
  };
  for (int round = 0; round < 300; ++round) {
    DeviceFacts facts;
    facts.arch = std::vector{"avx2", "avx512", "neon"}[random() % 3];
    facts.multiprocessors = static_cast<int>(1 + random() % 130);
    facts.l2_bytes = std::int64_t{1} << (20 + random() % 8);
    facts.memory_bytes = std::int64_t{1} << 34;
    const auto dtype = random() % 2 ? DType::f32 : DType::bf16;
    const auto problem = ffn_problem(DeviceKind::cpu, dtype, size(20), size(18), size(18));
    bool served = false;
    for (const auto* family : cpu_families()) {
      CAPTURE(problem.text(), family->name(), facts.multiprocessors);
      if (family->refusal(problem, facts)) {
        REQUIRE(family->name() != "cpu_plain");
        continue;
      }
      served = true;
      const auto space = family->space(problem, facts);
      REQUIRE(!space.feasible().empty());
      REQUIRE(space.violations(family->default_config(problem, facts)).empty());
      for (const auto& constraint : space.constraints()) REQUIRE(!constraint.reason.empty());
      for (const auto& parameter : space.parameters()) REQUIRE(!parameter.help.empty());
    }
    REQUIRE(served);
    REQUIRE(!default_recipe(ffn_op(), problem, facts).empty());
    REQUIRE(fallback_recipe(ffn_op(), problem, facts).front().family == "cpu_plain");
  }
}

TEST_CASE("the CPU baseline computes the same function") {
  const auto backend = open_cpu();
  for (const auto dtype : {DType::f32, DType::bf16}) {
    const auto problem = ffn_problem(DeviceKind::cpu, dtype, 9, 40, 5000);
    const auto baseline = ffn_op().baselines(problem, backend->facts()).front();
    const auto executable = backend->compile(baseline.program).executable;
    REQUIRE(executable);

    const auto plain = family_of(ffn_op(), "cpu_plain").program(problem, backend->facts(), {});
    const auto expected = backend->compile(plain).executable;
    auto specs = ffn_op().tensors(problem);
    specs.insert(specs.end(), baseline.extra.begin(), baseline.extra.end());
    std::mt19937 random(9);
    std::vector<std::vector<std::byte>> storage;
    std::vector<void*> tensors;
    for (const auto& spec : specs) {
      std::normal_distribution<float> normal(0, static_cast<float>(spec.scale));
      std::vector<float> values(static_cast<std::size_t>(spec.elements()));
      for (auto& value : values) value = normal(random);
      storage.emplace_back(spec.bytes());
      encode(dtype, values, storage.back().data());
    }
    for (auto& bytes : storage) tensors.push_back(bytes.data());
    std::vector<std::vector<float>> results;
    for (const auto& program : {executable, expected}) {
      const auto workspace = backend->allocate(program->workspace_bytes());
      program->enqueue(tensors.data(), workspace->data(), nullptr);
      results.emplace_back(9 * 40);
      decode(dtype, tensors[tensor_index(ffn_op().tensors(problem), "y")], results.back());
    }
    for (std::size_t i = 0; i < results[0].size(); ++i)
      REQUIRE(results[0][i] == Approx(results[1][i]).margin(dtype == DType::f32 ? 1e-5 : 0.03));
  }
}
