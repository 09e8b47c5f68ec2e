#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common/op_parts.hpp"
#include "kernels/indexer/indexer.hpp"
#include "support/fuzz_cases.hpp"
#include "support/op_reference.hpp"
#include "support/op_run.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();

Problem indexer_problem(DeviceKind kind, DType dtype, Sizes sizes, Options options = {}) {
  return canonical(indexer_op(), {"indexer", "fwd", dtype, std::move(sizes), std::move(options)},
                   kind);
}

Problem random_indexer(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  Sizes sizes{{"dim", draw.of(std::vector<std::int64_t>{1, 3, 8, 24, 32, 64, 72, 128, 128, 256})},
              {"heads", draw.of(std::vector<std::int64_t>{1, 2, 4, 5, 8, 12, 32, 64})}};
  const std::int64_t tokens =
      std::max<std::int64_t>(1, std::min(draw.size(11), most_elements / sizes["dim"]));
  sizes["b"] = 1 + draw.below(std::min<std::int64_t>(tokens, 5));
  sizes["kv"] = std::max<std::int64_t>(1, tokens / sizes["b"]);
  // Few queries, a prompt, and more queries than keys.
  sizes["s"] = draw.below(3) ? 1 + draw.below(8) : std::min<std::int64_t>(sizes["kv"], 80);
  while (sizes["heads"] > 1 &&
         sizes["b"] * sizes["s"] * sizes["heads"] * sizes["dim"] > 4 * most_elements)
    sizes["heads"] /= 2;
  sizes["top"] = draw.size(draw.below(2) ? 4 : 9);
  if (draw.below(2)) {
    sizes["page"] = draw.of(std::vector<std::int64_t>{1, 2, 7, 16, 64, 100});
    if (draw.below(2))
      sizes["pages"] = 1 + draw.below(2 * sizes["b"] * (sizes["kv"] / sizes["page"] + 1));
  }
  const bool e4m3 = draw.below(3) == 0;
  const std::int64_t keys = sizes.contains("page") ? sizes["page"] : sizes["kv"];
  if (draw.below(4) == 0)
    sizes["k-block"] = keys * sizes["dim"] + draw.below(3) * 8 + draw.below(2);
  if (e4m3 && draw.below(4) == 0) sizes["scale-block"] = keys + draw.below(10);
  return indexer_problem(
      kind, draw.of(indexer_op().dtypes(kind)), sizes,
      {{"lengths", draw.of({"no", "yes"})}, {"k-format", e4m3 ? "e4m3" : "same"}});
}

ReferenceTensors reference(const Problem& problem, ReferenceTensors tensors) {
  ReferenceTensors found = run_reference(problem, std::move(tensors));
  HostThreads threads;
  indexer_op().reference(problem, 1, found, threads);
  return found;
}

/// Runs every family of the backend's device, with the largest blocks of queries too.
template <typename Check>
void for_each_run(Backend& backend, const Problem& problem, const Check& check) {
  for (const Family* family : indexer_op().families()) {
    if (family->device_kind() != backend.facts().kind || family->refusal(problem, backend.facts()))
      continue;
    Config config = family->default_config(problem, backend.facts());
    for (const bool other : {false, true}) {
      if (other) {
        config = family->space(problem, backend.facts()).feasible().back();
        if (config.contains("held")) config.set("held", 0);
      }
      CAPTURE(problem.text(), family->name(), config.text());
      check(*family, config);
    }
  }
}

/// Equal scores, NaN, keys beyond the lengths, and lengths that lead outside.
void check_hostile_values(Backend& backend, DType dtype) {
  constexpr std::int64_t kv = 200, dim = 32, top = 20;
  const Sizes sizes{{"b", 4}, {"s", 2}, {"kv", kv}, {"heads", 3}, {"dim", dim}, {"top", top}};
  const Problem problem = indexer_problem(backend.facts().kind, dtype, sizes, {{"lengths", "yes"}});
  for_each_run(backend, problem, [&](const Family& family, const Config& config) {
    OpRun run(backend, indexer_op(), problem);
    // All products are 1 but for those that are set; heads weigh 2, -1 and 0.
    std::vector<float> q(run.values("q").size()), k(run.values("k").size(), nan), weights;
    for (std::size_t i = 0; i < q.size(); i += dim) q[i] = 1;
    for (int i = 0; i < 8; ++i) weights.insert(weights.end(), {2, -1, 0});
    const auto set = [&](std::int64_t sequence, std::int64_t key, float value) {
      float* const row = k.data() + (sequence * kv + key) * dim;
      std::fill_n(row, dim, 0.0F);
      row[0] = value;
    };
    for (std::int64_t j = 0; j < kv; ++j) set(0, j, j % 7 == 3 ? 2.0F : j % 2 == 0 ? -1.0F : -3.0F);
    for (std::int64_t j = 0; j < 90; ++j) set(2, j, 1);
    set(2, 70, nan);
    set(2, 89, 5);
    for (std::int64_t j = 0; j < 12; ++j) set(3, j, 1);
    run.set("q", q);
    run.set("weights", weights);
    run.set("k", k);
    run.set("lengths", {2.0e9F, -3, 90, 12});
    run.run(family.program(problem, backend.facts(), config));
    CHECK(run.damage().empty());
    const std::vector<float> ids = run.values("ids");
    const auto row = [&](std::int64_t index) {
      return std::vector<float>(ids.begin() + index * top, ids.begin() + (index + 1) * top);
    };
    const auto first = [&](std::int64_t count) {
      std::vector<float> expected(top, -1);
      for (std::int64_t i = 0; i < count; ++i)
        expected[static_cast<std::size_t>(i)] = static_cast<float>(i);
      return expected;
    };
    // 28 keys, and a later query 29, of score 2; the first of them are taken.
    std::vector<float> sevenths;
    for (std::int64_t i = 0; i < top; ++i) sevenths.push_back(static_cast<float>(3 + 7 * i));
    CHECK(row(0) == sevenths);
    CHECK(row(1) == sevenths);
    CHECK(row(2) == first(0));
    CHECK(row(3) == first(0));
    // NaN is best; the last key is seen by the last query alone.
    std::vector<float> with_nan = first(top);
    with_nan[top - 1] = 70;
    CHECK(row(4) == with_nan);
    with_nan[top - 2] = 70, with_nan[top - 1] = 89;
    CHECK(row(5) == with_nan);
    CHECK(row(6) == first(11));
    CHECK(row(7) == first(12));
  });
}

/// Pages out of range are pages of zeros; pages of nobody, and elements between pages, are NaN.
void check_pages(Backend& backend, DType dtype, const std::string& format) {
  const Problem problem = indexer_problem(backend.facts().kind, dtype,
                                          {{"b", 2},
                                           {"s", 1},
                                           {"kv", 20},
                                           {"heads", 2},
                                           {"dim", 16},
                                           {"top", 4},
                                           {"page", 4},
                                           {"pages", 6},
                                           {"k-block", 72}},
                                          {{"k-format", format}});
  for_each_run(backend, problem, [&](const Family& family, const Config& config) {
    OpRun run(backend, indexer_op(), problem);
    std::vector<float> k(run.values("k").size(), nan);
    // Key r of page i is 4 i + r + 1 in its first feature.
    for (std::size_t page : {0U, 1U, 3U, 5U})
      for (std::size_t row = 0; row < 4; ++row) {
        std::fill_n(k.begin() + static_cast<std::ptrdiff_t>(page * 72 + row * 16), 16, 0.0F);
        k[page * 72 + row * 16] = static_cast<float>(4 * page + row + 1) / 4;
      }
    std::vector<float> q(2 * 2 * 16);
    for (std::size_t i = 0; i < q.size(); i += 16) q[i] = 1;
    run.set("q", q);
    run.set("k", k);
    if (format == "e4m3") run.set("k_scale", std::vector<float>(24, 0.5F));
    run.set("weights", {1, 0, -1, 0});
    run.set("pages", {3, -1, 0, 5, 6, 5, 7, 1, 3, 0});
    run.run(family.program(problem, backend.facts(), config));
    CHECK(run.damage().empty());
    // The second sequence has scores below 0, but for the zeros of its second page.
    CHECK(run.values("ids") == std::vector<float>{12, 13, 14, 15, 4, 5, 6, 7});
  });
}

/// Scores that are all 0 behind relu, with weights of both signs: +0 and -0 are equal.
void check_zeros(Backend& backend) {
  const Problem problem =
      indexer_problem(backend.facts().kind, DType::bf16,
                      {{"b", 1}, {"s", 1}, {"kv", 3000}, {"heads", 2}, {"dim", 8}, {"top", 1100}});
  for_each_run(backend, problem, [&](const Family& family, const Config& config) {
    OpRun run(backend, indexer_op(), problem);
    std::vector<float> k(run.values("k").size(), -1.0F);
    run.set("q", std::vector<float>(16, 1.0F));
    run.set("weights", {-1.0F, -2.0F});
    run.set("k", k);
    run.run(family.program(problem, backend.facts(), config));
    CHECK(run.damage().empty());
    const std::vector<float> ids = run.values("ids");
    for (std::size_t i = 0; i < ids.size(); ++i) REQUIRE(ids[i] == static_cast<float>(i));
  });
}

}  // namespace

TEST_CASE("the reference of indexer is the definition, by hand") {
  // Two queries of two heads over three keys of two features.
  const Sizes sizes{{"b", 1}, {"s", 2}, {"kv", 3}, {"heads", 2}, {"dim", 2}, {"top", 2}};
  const auto found = reference(
      indexer_problem(DeviceKind::cpu, DType::f32, sizes),
      {{"q", {1, 0, 0, 1, -1, 0, 1, 1}}, {"weights", {2, -1, 1, 3}}, {"k", {1, 2, 3, -1, -4, 1}}});
  const double none = -std::numeric_limits<double>::infinity();
  CHECK(found.at("scores") == std::vector<double>{2 * 1 - 2, 2 * 3, none, 3 * 3, 3 * 2, 4 + 0});
  CHECK(found.at("ids") == std::vector<double>{0, 1, 0, 1});
  const auto one = reference(
      indexer_problem(DeviceKind::cpu, DType::f32,
                      {{"b", 1}, {"s", 2}, {"kv", 2}, {"heads", 1}, {"dim", 1}, {"top", 3}}),
      {{"q", {1, 1}}, {"weights", {1, 1}}, {"k", {1, 2}}});
  CHECK(one.at("ids") == std::vector<double>{0, -1, -1, 0, 1, -1});
}

TEST_CASE("a key's scale is a factor of its scores") {
  const auto found = reference(
      indexer_problem(DeviceKind::cpu, DType::f32,
                      {{"b", 1}, {"s", 1}, {"kv", 3}, {"heads", 2}, {"dim", 1}, {"top", 1}},
                      {{"k-format", "e4m3"}}),
      {{"q", {1, -1}}, {"weights", {1, 3}}, {"k", {4, 3, -2}}, {"k_scale", {0.5, 2, 0.25}}});
  CHECK(found.at("scores") == std::vector<double>{2, 6, 1.5});
  CHECK(found.at("ids") == std::vector<double>{1});
}

TEST_CASE("lists of other keys than those of the highest scores fail their verification") {
  const auto backend = open_cpu();
  const Problem problem =
      indexer_problem(DeviceKind::cpu, DType::f32,
                      {{"b", 2}, {"s", 3}, {"kv", 60}, {"heads", 4}, {"dim", 16}, {"top", 8}});
  const Family& family = family_of(indexer_op(), "cpu_indexer");
  const TensorPlaces places(indexer_op().tensors(problem));
  using Ids = std::int32_t*;
  using Scores = float*;
  /// Verifies ids that spoil(list, scores) has changed, of the last query.
  const auto passes = [&](void (*spoil)(Ids, Scores)) {
    Program program =
        family.program(problem, backend->facts(), family.default_config(problem, backend->facts()));
    program.steps.emplace_back(
        [=, ids = places.at("ids"), scores = places.at("scores")](const HostCall& call) {
          spoil(static_cast<Ids>(call.tensors[ids]) + 5 * 8,
                static_cast<Scores>(call.tensors[scores]) + 5 * 60);
        });
    Verifier verifier(*backend, indexer_op(), problem, 3);
    return verifier.verify(0, 2, {backend->compile(program).executable}).passed;
  };
  CHECK(passes([](Ids, Scores) {}));
  CHECK_FALSE(passes([](Ids ids, Scores) { std::swap(ids[2], ids[3]); }));
  CHECK_FALSE(passes([](Ids ids, Scores) { ids[3] = ids[2]; }));
  CHECK_FALSE(passes([](Ids ids, Scores) { ids[7] = -1; }));
  CHECK_FALSE(passes([](Ids ids, Scores) { ids[7] = 60; }));
  // The key of the lowest score instead of one of the best.
  CHECK_FALSE(passes([](Ids ids, Scores scores) {
    ids[0] = static_cast<std::int32_t>(std::min_element(scores, scores + 60) - scores);
    std::sort(ids, ids + 8);
  }));
}

TEST_CASE("keys of hostile values are chosen as defined on the CPU") {
  const auto backend = open_cpu();
  for (const DType dtype : {DType::f32, DType::bf16}) check_hostile_values(*backend, dtype);
  check_zeros(*backend);
}

TEST_CASE("keys in pages are chosen as defined on the CPU") {
  const auto backend = open_cpu();
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const char* format : {"same", "e4m3"}) check_pages(*backend, dtype, format);
}

TEST_CASE("keys in pages are chosen as defined on the GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const DType dtype : {DType::bf16, DType::fp16, DType::f32})
    for (const char* format : {"same", "e4m3"}) check_pages(*backend, dtype, format);
}

TEST_CASE("keys of hostile values are chosen as defined on the GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const DType dtype : {DType::bf16, DType::fp16, DType::f32})
    check_hostile_values(*backend, dtype);
  check_zeros(*backend);
}

TEST_CASE("a choice of thousands of keys is right on the GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(7);
  for (const Sizes& sizes :
       {Sizes{{"b", 2}, {"s", 1}, {"kv", 5000}, {"heads", 8}, {"dim", 64}},
        Sizes{{"b", 1}, {"s", 40}, {"kv", 700}, {"heads", 16}, {"dim", 32}, {"top", 64}}})
    CHECK(verify_variants(*backend, indexer_op(),
                          indexer_problem(DeviceKind::cuda, DType::bf16, sizes), random, 3) >= 4);
}

const FuzzCases<indexer_op, random_indexer, FuzzCounts{.small = 1500, .larger = 30, .gpu = 400}>
    indexer_cases;
