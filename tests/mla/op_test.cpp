#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/mla/decode_config.cuh"
#include "kernels/mla/mla.hpp"
#include "support/fuzz_cases.hpp"
#include "support/op_reference.hpp"
#include "support/op_run.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem mla_problem(DeviceKind kind, DType dtype, Sizes sizes, Options options = {}) {
  return canonical(mla_op(), {"mla", "fwd", dtype, std::move(sizes), std::move(options)}, kind);
}

Problem random_mla(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const std::int64_t ranks[] = {1, 3, 8, 24, 64, 72, 128, 160, 256, 512};
  const std::int64_t ropes[] = {0, 0, 2, 8, 32, 64, 64};
  Sizes sizes{{"rank", ranks[draw.below(10)]}};
  if (const std::int64_t rope = ropes[draw.below(7)]; rope > 0) sizes["rope"] = rope;
  const std::int64_t width = sizes["rank"] + (sizes.contains("rope") ? sizes["rope"] : 0);
  const std::int64_t tokens =
      std::max<std::int64_t>(1, std::min(draw.size(10), most_elements / width));
  sizes["b"] = 1 + draw.below(std::min<std::int64_t>(tokens, 6));
  sizes["kv"] = std::max<std::int64_t>(1, tokens / sizes["b"]);
  sizes["s"] = draw.below(2) ? 1 : 1 + draw.below(8);
  sizes["heads"] =
      draw.below(3) ? draw.size(5) : draw.of(std::vector<std::int64_t>{8, 16, 20, 128});
  while (sizes["heads"] > 1 && sizes["b"] * sizes["s"] * sizes["heads"] * width > 4 * most_elements)
    sizes["heads"] /= 2;
  Options options{{"lengths", draw.of({"no", "yes"})}, {"lse", draw.of({"no", "yes"})}};
  if (draw.below(2)) {
    sizes["page"] = draw.of(std::vector<std::int64_t>{1, 2, 7, 16, 64, 100});
    if (draw.below(2))
      sizes["pages"] = 1 + draw.below(2 * sizes["b"] * (sizes["kv"] / sizes["page"] + 1));
  }
  if (draw.below(4) == 0) sizes["kv-row"] = width + draw.below(3) * 8 + draw.below(2);
  if (draw.below(4) == 0) {
    const std::int64_t row = sizes.contains("kv-row") ? sizes["kv-row"] : width;
    const std::int64_t keys = sizes.contains("page") ? sizes["page"] : sizes["kv"];
    sizes["kv-block"] = keys * row + draw.below(3) * 8 + draw.below(2);
  }
  if (draw.below(3) == 0) options["scale"] = "0.05";
  if (draw.below(3) == 0) sizes["top"] = draw.size(8);
  return mla_problem(kind, draw.of(mla_op().dtypes(kind)), sizes, options);
}

/// The first configuration that loads keys by TMA, which takes rows without gaps, or else the
/// default one.
Config without_gaps(const Family& family, const Problem& problem, const DeviceFacts& facts) {
  for (const Config& config : family.space(problem, facts).feasible())
    if (config.contains("tma") && config.get("tma") == 1) return config;
  return family.default_config(problem, facts);
}

/// The cache beyond the lengths, and pages of nobody, hold NaN, and so do elements between rows and
/// blocks; pages and lengths have values that lead outside. Every family writes what it writes for
/// clean values, and nothing beside its outputs.
void check_foreign_values(Backend& backend, DType dtype, std::int64_t s, std::int64_t page,
                          bool gaps = true) {
  Sizes sizes{{"b", 5}, {"s", s}, {"kv", 150}, {"heads", 20}, {"rank", 128}, {"rope", 16}};
  if (gaps) sizes.insert({{"kv-row", 152}, {"kv-block", 150 * 152 + 8}});
  if (page > 0) sizes.insert({{"page", page}, {"pages", 60}});
  const Problem problem =
      mla_problem(backend.facts().kind, dtype, sizes, {{"lengths", "yes"}, {"lse", "yes"}});
  const mla::Layer layer = mla::layer_of(problem);
  const std::vector<float> lengths{150, -7, 1, 2.0e9F, 61};
  std::vector<float> pages;
  for (std::int64_t i = 0; i < layer.b * (page > 0 ? layer.pages_of_sequence() : 0); ++i)
    pages.push_back(i % 11 == 4 ? -1.0F : i % 11 == 9 ? 60.0F : static_cast<float>(i * 7 % 60));
  std::vector<bool> used(static_cast<std::size_t>(layer.blocks() * layer.block));
  for (std::int64_t i = 0; i < layer.b; ++i)
    for (std::int64_t j = 0; j < length_of(layer, lengths.data(), i); ++j)
      if (const std::int64_t place = mla::place_of(layer, pages.data(), i, j); place >= 0)
        std::fill_n(used.begin() + place, layer.width(), true);
  for (const Family* family : mla_op().families()) {
    if (family->device_kind() != backend.facts().kind || family->refusal(problem, backend.facts()))
      continue;
    const Config config = without_gaps(*family, problem, backend.facts());
    CAPTURE(problem.text(), family->name(), config.text());
    std::vector<std::vector<float>> results[2];
    for (const bool hostile : {false, true}) {
      OpRun run(backend, mla_op(), problem);
      run.set("lengths", lengths);
      if (page > 0) run.set("pages", pages);
      std::vector<float> cache = run.values("cache");
      for (std::size_t i = 0; i < cache.size(); ++i)
        if (!used[i]) cache[i] = hostile ? std::numeric_limits<float>::quiet_NaN() : 0;
      run.set("cache", cache);
      run.run(family->program(problem, backend.facts(), config));
      CHECK(run.damage().empty());
      for (const char* name : {"out", "lse"}) results[hostile].push_back(run.values(name));
    }
    CHECK(results[0] == results[1]);
    // The second sequence has no keys.
    const auto rows = static_cast<std::size_t>(layer.rows() * layer.rank);
    CHECK(std::all_of(results[1][0].begin() + static_cast<std::ptrdiff_t>(rows),
                      results[1][0].begin() + static_cast<std::ptrdiff_t>(2 * rows),
                      [](float value) { return value == 0; }));
    CHECK(results[1][1][static_cast<std::size_t>(layer.rows())] ==
          -std::numeric_limits<float>::infinity());
  }
}

/// NaN of a key that a sequence has reaches all its rows that see it, and no other sequence.
void check_own_nan(Backend& backend, DType dtype) {
  const Problem problem = mla_problem(backend.facts().kind, dtype,
                                      {{"b", 3}, {"s", 1}, {"kv", 70}, {"heads", 4}, {"rank", 32}});
  for (const Family* family : mla_op().families()) {
    if (family->device_kind() != backend.facts().kind || family->refusal(problem, backend.facts()))
      continue;
    CAPTURE(family->name());
    OpRun run(backend, mla_op(), problem);
    std::vector<float> cache = run.values("cache");
    cache[(70 + 33) * 32 + 5] = std::numeric_limits<float>::quiet_NaN();
    run.set("cache", cache);
    run.run(family->program(problem, backend.facts(),
                            family->default_config(problem, backend.facts())));
    const std::vector<float> out = run.values("out");
    for (std::size_t i = 0; i < out.size(); ++i) CHECK(std::isnan(out[i]) == (i / (4 * 32) == 1));
  }
}

/// Lists that are neither sorted nor of keys alone: queries are zeros, so that a result is the mean
/// of the latents that a list has. Keys that no list has are NaN.
void check_lists(Backend& backend, DType dtype, std::int64_t page) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  Sizes sizes{{"b", 2}, {"s", 3}, {"kv", 40}, {"heads", 3}, {"rank", 8}, {"rope", 8}, {"top", 5}};
  if (page > 0) sizes.insert({{"page", page}, {"pages", 50}});
  const Problem problem =
      mla_problem(backend.facts().kind, dtype, sizes, {{"lengths", "yes"}, {"lse", "yes"}});
  const mla::Layer layer = mla::layer_of(problem);
  // The queries of the first sequence see 38 to 40 keys, those of the second 4 to 6.
  const std::vector<float> lengths{40, 6};
  const std::vector<float> lists{37, 2, -1, 30, 38, 38, 0, 38, -7, 39, -1, -1, 40, -1, 2.0e9F,
                                 3,  4, 0,  -1, 6,  4,  5, 1,  7,  -1, 5,  4,  3,  2,  1};
  const std::vector<std::vector<float>> seen{{37, 2, 30}, {38, 0, 38}, {},
                                             {3, 0},      {4, 1},      {5, 4, 3, 2, 1}};
  std::vector<float> pages;
  for (std::int64_t i = 0; i < 2 * (page > 0 ? layer.pages_of_sequence() : 0); ++i)
    pages.push_back(static_cast<float>((i * 7 + 3) % 50));
  for (const Family* family : mla_op().families()) {
    if (family->device_kind() != backend.facts().kind || family->refusal(problem, backend.facts()))
      continue;
    CAPTURE(problem.text(), family->name());
    OpRun run(backend, mla_op(), problem);
    std::vector<float> cache(run.values("cache").size(), nan);
    for (std::size_t query = 0; query < seen.size(); ++query)
      for (const float key : seen[query]) {
        const std::int64_t place =
            mla::place_of(layer, pages.data(), static_cast<std::int64_t>(query) / 3,
                          static_cast<std::int64_t>(key));
        std::fill_n(cache.begin() + place, 16, key);
      }
    for (const char* name : {"q_latent", "q_rope"})
      run.set(name, std::vector<float>(run.values(name).size()));
    if (page > 0) run.set("pages", pages);
    run.set("cache", cache);
    run.set("lengths", lengths);
    run.set("chosen", lists);
    run.run(family->program(problem, backend.facts(),
                            family->default_config(problem, backend.facts())));
    CHECK(run.damage().empty());
    const std::vector<float> out = run.values("out"), lse = run.values("lse");
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::vector<float>& keys = seen[i / (3 * 8)];
      double sum = 0;
      for (const float key : keys) sum += key;
      CHECK(out[i] == Approx(keys.empty() ? 0 : sum / static_cast<double>(keys.size()))
                          .epsilon(dtype == DType::f32 ? 1e-5 : 0.01));
    }
    for (std::size_t i = 0; i < lse.size(); ++i) {  // [b, heads, s]
      const std::vector<float>& keys = seen[i / 9 * 3 + i % 3];
      if (keys.empty())
        CHECK(lse[i] == -std::numeric_limits<float>::infinity());
      else
        CHECK(lse[i] == Approx(std::log(static_cast<double>(keys.size()))).margin(1e-5));
    }
  }
}

}  // namespace

TEST_CASE("queries of mla see the keys of their lists alone, on the CPU") {
  const auto backend = open_cpu();
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const std::int64_t page : {0, 1, 16}) check_lists(*backend, dtype, page);
}

TEST_CASE("queries of mla see the keys of their lists alone, on the GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const std::int64_t page : {0, 1, 16}) check_lists(*backend, dtype, page);
}

TEST_CASE("mla's kernels with lists of many keys are right on the GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  const std::pair<Sizes, Options> problems[] = {
      {{{"b", 1}, {"s", 2}, {"kv", 900}, {"heads", 16}, {"rank", 512}, {"rope", 64}, {"top", 200}},
       {}},
      {{{"b", 3}, {"s", 3}, {"kv", 150}, {"heads", 20}, {"rank", 64}, {"page", 7}, {"top", 100}},
       {{"lengths", "yes"}, {"lse", "yes"}}}};
  std::mt19937_64 random(8);
  for (const auto& [sizes, options] : problems)
    CHECK(verify_variants(*backend, mla_op(),
                          mla_problem(DeviceKind::cuda, DType::bf16, sizes, options), random,
                          2) >= 3);
}

TEST_CASE("the reference of mla is the definition, by hand") {
  // Two queries of one head over three keys of two latents and one rotated feature.
  const Sizes sizes{{"b", 1}, {"s", 2}, {"kv", 3}, {"heads", 1}, {"rank", 2}, {"rope", 1}};
  const auto found = run_reference(
      mla_problem(DeviceKind::cpu, DType::f32, sizes, {{"scale", "1"}, {"lse", "yes"}}),
      {{"q_latent", {1, 0, 0, 1}}, {"q_rope", {2, -1}}, {"cache", {1, 2, 0, 0, 4, 1, 3, 1, -1}}});
  // The first query sees keys 0 and 1 with scores 1 and 2, the second all with 2, 3 and 2.
  const double e = std::exp(1.0);
  CHECK(found.at("out")[0] == Approx(1 / (1 + e)));
  CHECK(found.at("out")[1] == Approx((2 + 4 * e) / (1 + e)));
  CHECK(found.at("out")[2] == Approx((1 + 3) / (2 + e)));
  CHECK(found.at("out")[3] == Approx((2 + 4 * e + 1) / (2 + e)));
  CHECK(found.at("lse")[0] == Approx(1 + std::log(1 + e)));
  CHECK(found.at("lse")[1] == Approx(2 + std::log(2 + e)));
}

TEST_CASE("the absorbed form of mla is the attention of expanded keys and values") {
  // The definition of DeepSeek-V2: K = [W_UK latent, rope], V = W_UV latent, for each head.
  constexpr std::size_t heads = 3, nope = 4, v = 5, rank = 6, rope = 2, kv = 7;
  NormalValues drawn{std::mt19937_64(2)};
  const auto w_uk = drawn(heads * nope * rank), w_uv = drawn(heads * v * rank);
  const auto q_nope = drawn(heads * nope), q_rope = drawn(heads * rope);
  const auto cache = drawn(kv * (rank + rope));
  std::vector<double> q_latent(heads * rank);
  for (std::size_t h = 0; h < heads; ++h)
    for (std::size_t i = 0; i < nope; ++i)
      for (std::size_t c = 0; c < rank; ++c)
        q_latent[h * rank + c] += w_uk[(h * nope + i) * rank + c] * q_nope[h * nope + i];
  const auto found = run_reference(
      mla_problem(
          DeviceKind::cpu, DType::f32,
          {{"b", 1}, {"s", 1}, {"kv", kv}, {"heads", heads}, {"rank", rank}, {"rope", rope}},
          {{"scale", "0.5"}}),
      {{"q_latent", q_latent}, {"q_rope", q_rope}, {"cache", cache}});
  for (std::size_t h = 0; h < heads; ++h) {
    std::vector<double> weights(kv), expanded(v);
    double sum = 0;
    for (std::size_t t = 0; t < kv; ++t) {
      const double* const row = cache.data() + t * (rank + rope);
      double score = 0;
      for (std::size_t i = 0; i < nope; ++i)
        for (std::size_t c = 0; c < rank; ++c)
          score += q_nope[h * nope + i] * w_uk[(h * nope + i) * rank + c] * row[c];
      for (std::size_t i = 0; i < rope; ++i) score += q_rope[h * rope + i] * row[rank + i];
      sum += weights[t] = std::exp(0.5 * score);
    }
    for (std::size_t t = 0; t < kv; ++t)
      for (std::size_t i = 0; i < v; ++i)
        for (std::size_t c = 0; c < rank; ++c)
          expanded[i] +=
              weights[t] / sum * w_uv[(h * v + i) * rank + c] * cache[t * (rank + rope) + c];
    for (std::size_t i = 0; i < v; ++i) {
      double absorbed = 0;
      for (std::size_t c = 0; c < rank; ++c)
        absorbed += w_uv[(h * v + i) * rank + c] * found.at("out")[h * rank + c];
      CHECK(absorbed == Approx(expanded[i]).margin(1e-12));
    }
  }
}

TEST_CASE("the groups of mla's decoding fit the device, and cut no sequence without need") {
  const mla_decode_config config{.keys = 32, .ctas_per_sm = 2};
  // 128 tiles of a sequence.
  CHECK(mla_grid_of(config, 132, 1, 16, 4096, true).groups == 128);
  CHECK(mla_grid_of(config, 132, 264, 16, 4096, true).groups == 264);
  CHECK_FALSE(mla_grid_of(config, 132, 264, 16, 4096, true).cuts);
  CHECK(mla_grid_of(config, 132, 264, 16, 4096, false).cuts);
  // 64 blocks of rows leave room for four groups; 300 leave none for a second.
  CHECK(mla_grid_of(config, 132, 8, 1024, 4096, false).groups == 4);
  CHECK(mla_grid_of(config, 132, 8, 4800, 4096, false).groups == 1);
  CHECK_FALSE(mla_grid_of(config, 132, 8, 4800, 4096, false).cuts);
}

TEST_CASE("foreign values of mla's cache have no effect on the CPU") {
  const auto backend = open_cpu();
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const std::int64_t s : {1, 3})
      for (const std::int64_t page : {0, 16, 7}) check_foreign_values(*backend, dtype, s, page);
  check_own_nan(*backend, DType::f32);
}

TEST_CASE("groups of mla's decoding that share sequences are right on the GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  const std::pair<Sizes, Options> problems[] = {
      {{{"b", 1}, {"s", 1}, {"kv", 200}, {"heads", 16}, {"rank", 512}, {"rope", 64}}, {}},
      {{{"b", 3}, {"s", 3}, {"kv", 150}, {"heads", 20}, {"rank", 64}, {"rope", 16}, {"page", 7}},
       {{"lengths", "yes"}, {"lse", "yes"}}},
      {{{"b", 2}, {"s", 1}, {"kv", 90}, {"heads", 70}, {"rank", 160}}, {{"lse", "yes"}}}};
  std::mt19937_64 random(3);
  for (const auto& [sizes, options] : problems)
    CHECK(verify_variants(*backend, mla_op(),
                          mla_problem(DeviceKind::cuda, DType::bf16, sizes, options), random,
                          2) >= 3);
}

TEST_CASE("groups of mla's decoding with ends of two sequences are right on the GPU",
          "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  const Problem problem = mla_problem(
      DeviceKind::cuda, DType::bf16, {{"b", 7}, {"s", 1}, {"kv", 700}, {"heads", 20}, {"rank", 32}},
      {{"lengths", "yes"}, {"lse", "yes"}});
  const Family& family = family_of(mla_op(), "mla_decode");
  // Eight tiles of a group, and up to 44 of a sequence: most groups begin within one sequence and
  // end in another.
  for (const Config& config : family.space(problem, backend->facts()).feasible()) {
    if (config.at("keys") != 16 || config.at("least_tiles") != 8 || config.at("stages") != 3 ||
        config.at("ctas_per_sm") != 1)
      continue;
    Verifier verifier(*backend, mla_op(), problem, 5);
    verify_variant(verifier, {&family, config, 0, 1},
                   backend->compile(family.program(problem, backend->facts(), config)));
  }
}

TEST_CASE("wgmma's kernel of mla is right on the GPU, its sequences cut or whole", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  const std::pair<Sizes, Options> forms[] = {
      {{{"b", 1}, {"s", 1}, {"kv", 330}, {"heads", 16}, {"rank", 512}, {"rope", 64}}, {}},
      {{{"b", 2}, {"s", 2}, {"kv", 200}, {"heads", 40}, {"rank", 512}, {"rope", 64}, {"page", 64}},
       {{"lengths", "yes"}, {"lse", "yes"}}},
      {{{"b", 5}, {"s", 4}, {"kv", 300}, {"heads", 20}, {"rank", 256}, {"rope", 32}, {"page", 24}},
       {{"lengths", "yes"}}},
      {{{"b", 3}, {"s", 1}, {"kv", 70}, {"heads", 128}, {"rank", 384}}, {{"lse", "yes"}}},
      {{{"b", 140}, {"s", 1}, {"kv", 40}, {"heads", 8}, {"rank", 128}, {"rope", 16}},
       {{"lengths", "yes"}}}};
  std::vector<Problem> problems;
  for (const auto& [sizes, options] : forms)
    problems.push_back(mla_problem(
        DeviceKind::cuda, problems.size() % 2 == 0 ? DType::bf16 : DType::fp16, sizes, options));
  if (const auto reason =
          family_of(mla_op(), "mla_sm90").refusal(problems.front(), backend->facts()))
    FFTUNE_SKIP(*reason);
  std::mt19937_64 random(4);
  verify_families(*backend, mla_op(), problems, random, 1,
                  [](const Family& family) { return family.name() == "mla_sm90"; });
}

TEST_CASE("wgmma's kernel of mla is right with keys by TMA", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  const std::pair<Sizes, Options> forms[] = {
      {{{"b", 2}, {"s", 2}, {"kv", 330}, {"heads", 40}, {"rank", 512}, {"rope", 64}, {"page", 64}},
       {{"lse", "yes"}}},
      {{{"b", 3}, {"s", 1}, {"kv", 200}, {"heads", 16}, {"rank", 256}, {"rope", 32}, {"page", 128}},
       {{"lengths", "yes"}}},
      {{{"b", 3}, {"s", 1}, {"kv", 130}, {"heads", 70}, {"rank", 128}}, {}}};
  const Family& family = family_of(mla_op(), "mla_sm90");
  for (const auto& [sizes, options] : forms) {
    const Problem problem = mla_problem(DeviceKind::cuda, DType::bf16, sizes, options);
    if (const auto reason = family.refusal(problem, backend->facts())) FFTUNE_SKIP(*reason);
    Verifier verifier(*backend, mla_op(), problem, 6);
    for (const Config& config : family.space(problem, backend->facts()).feasible()) {
      if (config.at("tma") != 1 || config.at("stages") > 3 || config.at("least_tiles") != 1)
        continue;
      verify_variant(verifier, {&family, config, 0, 1},
                     backend->compile(family.program(problem, backend->facts(), config)));
    }
  }
}

TEST_CASE("foreign values of mla's cache have no effect on the GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const DType dtype : {DType::bf16, DType::fp16, DType::f32})
    for (const std::int64_t s : {1, 3})
      for (const std::int64_t page : {0, 16, 7}) check_foreign_values(*backend, dtype, s, page);
  for (const std::int64_t page : {0, 64})
    check_foreign_values(*backend, DType::bf16, 3, page, false);
  check_own_nan(*backend, DType::bf16);
}

TEST_CASE("many rows with many keys are wgmma's where it serves, and others mma.sync's") {
  const auto first = [](const char* arch, std::int64_t b, std::int64_t heads, std::int64_t kv,
                        std::int64_t rank) {
    const Problem problem = mla_problem(DeviceKind::cuda, DType::bf16,
                                        {{"b", b},
                                         {"s", 1},
                                         {"kv", kv},
                                         {"heads", heads},
                                         {"rank", rank},
                                         {"rope", 64},
                                         {"page", 64}});
    return default_recipe(mla_op(), problem, products_of_architecture(arch).front()).front().family;
  };
  CHECK(first("sm_90a", 32, 128, 4096, 512) == "mla_sm90");
  CHECK(first("sm_90a", 128, 16, 4096, 512) == "mla_decode");
  CHECK(first("sm_90a", 1, 8, 64, 512) == "mla_decode");
  CHECK(first("sm_90a", 32, 128, 4096, 160) == "mla_decode");
  CHECK(first("sm_80", 32, 128, 4096, 512) == "mla_decode");
}

const FuzzCases<mla_op, random_mla, FuzzCounts{.small = 1500, .larger = 30, .gpu = 400}> mla_cases;
