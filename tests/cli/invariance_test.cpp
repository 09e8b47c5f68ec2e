// Batch invariance: the bits of a row do not depend on the rows beside it.
#include "apps/fftune/check/invariance.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "runtime/choice.hpp"
#include "runtime/devices.hpp"
#include "sandbox.hpp"
#include "support/catch.hpp"
#include "support/fuzz.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::tool;
using fftune::testing::Sandbox;

namespace {

std::vector<DeviceFacts> gpus() {
  std::vector<DeviceFacts> all = products_of_architecture("sm_90a");
  for (const DeviceFacts& facts : products_of_architecture("sm_80")) all.push_back(facts);
  return all;
}

/// Powers of two up to `most`, and the numbers beside them: the tool runs all numbers.
std::vector<std::int64_t> counts_to(std::int64_t most) {
  std::vector<std::int64_t> counts{1, 2, 3};
  for (std::int64_t power = 4; power <= most; power *= 2)
    for (const std::int64_t count : {power - 1, power, power + 1})
      if (count > counts.back() && count <= most) counts.push_back(count);
  return counts;
}

}  // namespace

TEST_CASE("rows have the same bits in every batch on the CPU") {
  const auto backend = open_cpu();
  const auto counts = std::vector<std::int64_t>{1, 2, 3, 7, 16, 17, 33, 64};
  for (const Problem& problem : invariance_problems(builtin_catalog(), DeviceKind::cpu)) {
    INFO(problem.text());
    CHECK(check_invariance(builtin_catalog(), *backend, {}, problem, 65, counts).difference == "");
  }
}

TEST_CASE("without the option some rows have other bits on the CPU") {
  const auto backend = open_cpu();
  int different = 0;
  for (Problem problem : invariance_problems(builtin_catalog(), DeviceKind::cpu)) {
    problem.options.erase("batch-invariant");
    const auto result = check_invariance(builtin_catalog(), *backend, {}, problem, 65,
                                         std::vector<std::int64_t>{1, 2, 3, 7, 33});
    if (!result.difference.empty()) ++different;
  }
  CHECK(different > 0);
}

TEST_CASE("all variants of a batch-invariant problem on a GPU have one order of sums") {
  // By the parameters that decide it, whatever the number of tokens.
  const auto order_of = [](const Variant& variant) {
    std::string order;
    const bool is_norm = variant.family.find("rows") != std::string::npos;
    for (const char* name : {"split_k", "vector", "group", "cluster", "warps", "rows"})
      if (variant.config.contains(name) && (is_norm || std::string(name) == "split_k"))
        order += fmt::format("{}={} ", name, variant.config.at(name));
    for (const char* name : {"bn", "split_keys"})
      if (variant.family.find("attention") == 0 && variant.config.contains(name))
        order += fmt::format("{}={} ", name, variant.config.at(name));
    return order;
  };
  for (const DeviceFacts& facts : gpus())
    for (const Problem& one : invariance_problems(builtin_catalog(), DeviceKind::cuda)) {
      INFO(facts.name << ": " << one.text());
      const Op& op = builtin_catalog().op(one.op);
      std::map<std::string, std::string> orders;  // by stages
      for (const std::int64_t count : {1, 5, 16, 64, 130, 2048}) {
        const Problem problem = one.with_size(invariance_rows(op, one), count);
        const auto specs = op.stages(problem);
        for (const Family* family : op.families()) {
          if (family->device_kind() != DeviceKind::cuda || family->refusal(problem, facts))
            continue;
          CHECK(family->name().find("decode") == std::string_view::npos);
          const auto of_op = [&](const std::string& name) {
            return std::any_of(specs.begin(), specs.end(),
                               [&](const StageSpec& spec) { return spec.name == name; });
          };
          if (family->is_fallback() || !of_op(family->stages().front())) continue;
          if (family->name().find("combine") != std::string_view::npos ||
              family->name().find("route") != std::string_view::npos)
            continue;
          const auto feasible = family->space(problem, facts).feasible();
          REQUIRE_FALSE(feasible.empty());
          for (const Config& config : feasible) {
            const std::string order = order_of({std::string(family->name()), config});
            const auto [known, is_new] = orders.try_emplace(family->stages().front(), order);
            if (known->second != order) FAIL(known->second << " and " << order);
          }
        }
        const Recipe recipe = default_recipe(op, problem, facts);
        for (const Variant& variant : recipe) CHECK(illegality(op, problem, facts, variant) == "");
      }
    }
}

TEST_CASE(
    "batch-invariant attention divides the keys of few sequences, in the chunks of all others") {
  const Op& op = builtin_catalog().op("attention");
  for (const DeviceFacts& facts : products_of_architecture("sm_90a"))
    for (const auto& [b, dim, is_divided] : {std::tuple(1, 128, true),
                                             {1, 64, true},
                                             {4, 128, true},
                                             {64, 128, false},
                                             {1, 256, false}}) {
      const Problem problem = canonical(op,
                                        {"attention",
                                         "fwd",
                                         DType::bf16,
                                         {{"b", b},
                                          {"s", 1},
                                          {"heads", 32},
                                          {"kv-heads", 8},
                                          {"dim", dim},
                                          {"kv", 2048},
                                          {"page", 16}},
                                         {{"lengths", "yes"}, {"batch-invariant", "yes"}}},
                                        DeviceKind::cuda);
      INFO(facts.name << ": " << problem.text());
      const Recipe recipe = default_recipe(op, problem, facts);
      REQUIRE(recipe.size() == 1);
      CHECK(recipe.front().config.get("divided") == is_divided);
    }
}

TEST_CASE("check --batch-invariance reports every problem") {
  const Sandbox sandbox;
  const auto done =
      sandbox.fftune("check --batch-invariance --device cpu --most 9 --op linear,rmsnorm");
  CHECK(done.code == 0);
  CHECK(done.out.find("same bits") != std::string::npos);
  CHECK(sandbox.fftune("check --batch-invariance --device cpu --op rope").code == 2);
  CHECK(sandbox.fftune("check --most 9").code == 2);
}

TEST_CASE("rows have the same bits in every batch on the GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const auto counts = counts_to(2048);
  for (const Problem& problem : invariance_problems(builtin_catalog(), DeviceKind::cuda)) {
    INFO(problem.text());
    CHECK(check_invariance(builtin_catalog(), *backend, {}, problem, 2048, counts).difference ==
          "");
  }
}
