// A rank with whole experts (own-experts): families against the reference, and the sum of all
// ranks' results against the whole mixture.
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/distribution.hpp"
#include "cpu/open.hpp"
#include "moe/problems.hpp"
#include "support/fields.hpp"
#include "support/op_run.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem slice_problem(const MoeSizes& sizes, std::int64_t own, DType dtype, Options options = {},
                      const std::string& pass = "fwd") {
  Problem problem = moe_problem(sizes, dtype, DeviceKind::cpu, std::move(options), pass);
  problem.sizes["own-experts"] = own;
  return canonical(moe_ffn_op(), problem, DeviceKind::cpu);
}

}  // namespace

TEST_CASE("a rank's whole experts on the CPU", "[slice]") {
  const auto backend = open_cpu();
  std::mt19937_64 random(1);
  const auto verify = [&](const Problem& problem) {
    verify_families(*backend, moe_ffn_op(), {problem}, random, 1);
  };
  // One expert, more choices than experts here, and all of them.
  for (const std::int64_t own : {1, 3, 6})
    verify(slice_problem({7, 24, 40, 6, 4}, own, DType::f32));
  verify(slice_problem({19, 40, 24, 9, 2}, 3, DType::bf16, {{"routing", "zipf:2"}}));
  for (const Options& options :
       {Options{{"weigh", "before"}, {"save", "preact"}}, Options{{"bias", "all"}},
        Options{{"residual", "yes"}, {"gate-up", "halves"}}, Options{{"weights", "int4"}}})
    verify(slice_problem({7, 128, 128, 6, 3}, 2, DType::f32, options));
  verify(slice_problem({5, 136, 264, 6, 3}, 2, DType::fp8, {{"scales", "block"}}));
  verify(slice_problem({5, 256, 128, 6, 3}, 2, DType::bf16, {{"quantise", "token"}}));
  for (const Options& options :
       {Options{}, Options{{"bias", "all"}}, Options{{"weigh", "before"}, {"save", "input"}},
        Options{{"frozen", "yes"}}})
    verify(slice_problem({7, 24, 40, 6, 4}, 2, DType::f32, options, "bwd"));
}

TEST_CASE("the results of ranks with whole experts add up to the mixture's", "[slice]") {
  const auto backend = open_cpu();
  const Op& op = moe_ffn_op();
  const MoeSizes sizes{11, 16, 24, 12, 3};
  const Problem whole = moe_problem(sizes, DType::f32, DeviceKind::cpu);
  const auto count = static_cast<std::size_t>(sizes.m * sizes.choices);
  std::map<std::string, std::vector<float>> routings;
  // Even, uneven, all tokens to the experts of one rank, and ids that name no expert of any rank.
  for (const double skew : {0.0, 2.0}) {
    const auto ids = draw_routing({skew}, sizes.m, sizes.experts, sizes.choices, 5);
    routings[skew == 0 ? "uniform" : "zipf"] = {ids.begin(), ids.end()};
  }
  routings["nobody"] = std::vector<float>(count, -1);
  for (std::size_t i = 0; i < count; ++i) {
    const auto choice = static_cast<float>(i % static_cast<std::size_t>(sizes.choices));
    routings["last"].push_back(static_cast<float>(sizes.experts) - 1 - choice);
    routings["extremes"].push_back(i % 3 == 0   ? static_cast<float>(i % 12)
                                   : i % 3 == 1 ? 0x1.fffffep30f  // 2147483520
                                                : -0x1p31f);
  }
  for (const std::int64_t ranks : {2, 3, 4}) {
    const std::int64_t own = sizes.experts / ranks;
    const Problem slice = slice_problem(sizes, own, DType::f32);
    for (const auto& [name, ids] : routings) {
      CAPTURE(name, ranks);
      OpRun all(*backend, op, whole);
      all.set("ids", ids);
      all.run(op, whole, default_recipe(op, whole, backend->facts()));
      const auto expected = all.values("y");
      std::vector<float> sum(expected.size());
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        OpRun run(*backend, op, slice);
        for (const char* same : {"x", "weights"}) run.set(same, all.values(same));
        run.set("ids", ids);
        run.set("first_expert", {static_cast<float>(rank * own)});
        for (const char* tensor : {"w_gate", "w_up", "w_down"}) {
          const auto values = all.values(tensor);
          const auto part = static_cast<std::ptrdiff_t>(values.size()) / ranks;
          run.set(tensor, {values.begin() + rank * part, values.begin() + (rank + 1) * part});
        }
        run.run(op, slice, default_recipe(op, slice, backend->facts()));
        CHECK(run.damage().empty());
        const auto y = run.values("y");
        for (std::size_t i = 0; i < y.size(); ++i) sum[i] += y[i];
      }
      double largest = 0;
      for (std::size_t i = 0; i < sum.size(); ++i)
        largest = std::max(largest, std::abs(static_cast<double>(sum[i]) - expected[i]));
      CHECK(largest < 1e-5);
    }
  }
}

TEST_CASE("what a rank's whole experts do not go with", "[slice]") {
  const MoeSizes sizes{7, 24, 40, 6, 4};
  const auto refuses = [](const auto& make, const char* words) {
    CHECK_THROWS_WITH(make(), ContainsSubstring(words));
  };
  refuses([&] { return slice_problem(sizes, 7, DType::f32); }, "own-experts=7 exceeds experts=6");
  refuses(
      [&] {
        return slice_problem({7, 24, 40, 6, 4, 1}, 3, DType::f32);
      },
      "shared with own-experts");
}
