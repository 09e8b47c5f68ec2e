#include "runtime/slower_fallback.hpp"

#include <map>
#include <string>

#include "registry/catalog.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

Problem problem_of(const std::string& op, const DeviceFacts& facts,
                   std::map<std::string, std::int64_t> sizes, DType dtype) {
  return canonical(builtin_catalog().op(op), {op, "fwd", dtype, std::move(sizes), {}}, facts.kind);
}

std::optional<SlowerFallback> found_for(const std::string& op, const DeviceFacts& facts,
                                        std::map<std::string, std::int64_t> sizes,
                                        DType dtype = DType::bf16,
                                        decltype(&default_recipe) recipe = &default_recipe) {
  const Op& of = builtin_catalog().op(op);
  const Problem problem = problem_of(op, facts, std::move(sizes), dtype);
  return slower_fallback(of, problem, facts, recipe(of, problem, facts));
}

/// Of the fallbacks alone.
std::optional<SlowerFallback> found_for_fallbacks(const std::string& op, const DeviceFacts& facts,
                                                  std::map<std::string, std::int64_t> sizes,
                                                  DType dtype = DType::bf16) {
  return found_for(op, facts, std::move(sizes), dtype, &fallback_recipe);
}

}  // namespace

TEST_CASE("fallbacks of rows that are not aligned are slower than PyTorch's, and no default") {
  for (const char* arch : {"sm_80", "sm_89", "sm_90a"})
    for (const std::int64_t m : {1, 16, 512, 8192}) {
      const DeviceFacts facts = facts_of_architecture(arch);
      CAPTURE(arch, m);
      const auto odd = found_for_fallbacks("linear", facts, {{"m", m}, {"k", 4097}, {"n", 4096}});
      REQUIRE(odd);
      CHECK(odd->stages == std::vector<std::string>{"product"});
      CHECK(odd->seconds > odd->pytorch_seconds);
      CHECK(odd->pytorch_seconds > 1e-6);
      CHECK_FALSE(found_for("linear", facts, {{"m", m}, {"k", 4096}, {"n", 4096}}));
      CHECK_FALSE(found_for("linear", facts, {{"m", m}, {"k", 4097}, {"n", 4096}}));
      const auto both = found_for_fallbacks("ffn", facts, {{"m", m}, {"d", 4095}, {"h", 4097}});
      REQUIRE(both);
      CHECK(both->stages == std::vector<std::string>{"gate_up", "down"});
      CHECK_FALSE(found_for("ffn", facts, {{"m", m}, {"d", 4095}, {"h", 4097}}));
    }
}

TEST_CASE("products in f32 are slower than PyTorch's, and so is attention of many tokens") {
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  CHECK(found_for("linear", facts, {{"m", 512}, {"k", 4096}, {"n", 4096}}, DType::f32));
  const std::map<std::string, std::int64_t> heads{
      {"b", 1}, {"s", 4096}, {"heads", 16}, {"dim", 128}};
  CHECK(found_for("attention", facts, heads, DType::f32));
  CHECK_FALSE(found_for("attention", facts, heads));
}

TEST_CASE("small products are no slower in a fallback than a launch of PyTorch's") {
  CHECK_FALSE(
      found_for("linear", facts_of_architecture("sm_90a"), {{"m", 4}, {"k", 33}, {"n", 33}}));
}

TEST_CASE("estimates of fallbacks are near the times of an H200") {
  struct Timed {
    std::int64_t m, k, n;
    DType dtype;
    double fallback_us, pytorch_us;
  };
  DeviceFacts h200 = facts_of_architecture("sm_90a");
  h200.memory_bandwidth = 4.8e12;
  for (const Timed& timed : {Timed{1, 4097, 4096, DType::bf16, 489.8, 12.8},
                             {1024, 4097, 4096, DType::bf16, 2885, 272},
                             {4096, 4097, 4096, DType::bf16, 10624, 1059},
                             {1024, 1021, 1021, DType::bf16, 192.5, 26.5},
                             {4096, 4096, 4096, DType::f32, 11113, 2734},
                             {1024, 1024, 1024, DType::f32, 182.9, 58.1}}) {
    CAPTURE(timed.m, timed.k);
    const auto found = found_for_fallbacks(
        "linear", h200, {{"m", timed.m}, {"k", timed.k}, {"n", timed.n}}, timed.dtype);
    REQUIRE(found);
    CHECK(1e6 * found->seconds == Approx(timed.fallback_us).epsilon(0.35));
    CHECK(1e6 * found->pytorch_seconds > 0.9 * timed.pytorch_us);
  }
}

TEST_CASE("a CPU has no estimates of PyTorch's time") {
  DeviceFacts facts;
  facts.kind = DeviceKind::cpu;
  facts.multiprocessors = 8;
  facts.clock_hz = 3e9;
  facts.memory_bandwidth = 1e11;
  CHECK_FALSE(found_for("linear", facts, {{"m", 64}, {"k", 4097}, {"n", 4096}}, DType::f32));
}
