// Every family of the mixture's ops, over sizes that no tile divides, and over routings of all
// kinds.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <future>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/distribution.hpp"
#include "cpu/open.hpp"
#include "kernels/moe_route/moe_route.hpp"
#include "moe/problems.hpp"
#include "support/fields.hpp"
#include "support/op_run.hpp"
#include "support/temporary_folder.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Side by side: what is compiled again later comes from the cache.
std::vector<CompileResult> compile_all(Backend& backend, const std::vector<Program>& programs) {
  std::vector<std::future<CompileResult>> compilations;
  for (const Program& program : programs)
    compilations.push_back(
        std::async(std::launch::async, [&] { return backend.compile(program); }));
  std::vector<CompileResult> results;
  for (auto& compilation : compilations) results.push_back(compilation.get());
  return results;
}

void verify(Backend& backend, const Problem& problem, std::mt19937_64& random, int more) {
  verify_families(backend, builtin_catalog().op(problem.op), {problem}, random, more);
}

std::vector<Problem> router_problems(DeviceKind kind, DType dtype) {
  std::vector<Problem> problems;
  const auto add = [&](const std::string& pass, std::map<std::string, std::int64_t> sizes,
                       Options options) {
    problems.push_back(canonical(
        moe_route_op(), {"moe-route", pass, dtype, std::move(sizes), std::move(options)}, kind));
  };
  for (const char* pass : {"fwd", "bwd"})
    for (const std::int64_t m : {1, 70}) {
      add(pass, {{"m", m}, {"experts", 128}, {"top-k", 8}}, {});
      add(pass, {{"m", m}, {"experts", 8}, {"top-k", 2}}, {{"renormalise", "yes"}});
      add(pass, {{"m", m}, {"experts", 37}, {"top-k", 4}}, {{"order", "after"}});
      add(pass, {{"m", m}, {"experts", 1000}, {"top-k", 32}},
          {{"score", "sigmoid"}, {"renormalise", "yes"}, {"scale", "2.5"}});
      add(pass, {{"m", m}, {"experts", 32}, {"top-k", 4}},
          {{"score", "sigmoid"}, {"renormalise", "yes"}, {"sum-eps", "1e-06"}});
      add(pass, {{"m", m}, {"experts", 1}, {"top-k", 1}}, {});
    }
  add("fwd", {{"m", 70}, {"experts", 256}, {"top-k", 8}, {"groups", 8}, {"top-groups", 4}},
      {{"score", "sigmoid"},
       {"bias", "yes"},
       {"group-score", "top2"},
       {"renormalise", "yes"},
       {"scale", "2.5"}});
  add("fwd", {{"m", 70}, {"experts", 160}, {"top-k", 6}, {"groups", 8}, {"top-groups", 3}},
      {{"scale", "16"}});
  return problems;
}

/// Each option of the forward pass at least once, and those that meet in one kernel together.
std::vector<Options> forward_forms() {
  return {{{"weigh", "before"}},
          {{"gate-up", "halves"}},
          {{"gate-up", "interleaved"}},
          {{"bias", "all"}},
          {{"residual", "yes"}},
          {{"residual", "yes"}, {"weigh", "before"}, {"bias", "all"}},
          {{"act", "swiglu-oai"}, {"bias", "all"}, {"gate-up", "interleaved"}},
          {{"act", "swiglu-oai"}, {"bias", "all"}, {"gate-up", "halves"}, {"weigh", "before"}},
          {{"weigh", "before"}, {"save", "preact"}, {"act", "gelu"}}};
}

/// The same of the backward pass.
std::vector<Options> backward_forms() {
  return {{},
          {{"save", "input"}},
          {{"accumulate", "yes"}, {"act", "gelu"}},
          {{"weigh", "before"}},
          {{"weigh", "before"}, {"save", "input"}, {"gate-up", "interleaved"}},
          {{"gate-up", "halves"}, {"accumulate", "yes"}},
          {{"gate-up", "interleaved"}, {"act", "swiglu-oai"}, {"bias", "all"}},
          {{"gate-up", "halves"}, {"act", "swiglu-oai"}, {"bias", "all"}, {"save", "input"}},
          {{"bias", "all"}, {"weigh", "before"}, {"accumulate", "yes"}},
          {{"frozen", "yes"}},
          {{"frozen", "yes"}, {"bias", "all"}, {"gate-up", "halves"}, {"save", "input"}},
          {{"frozen", "yes"}, {"weigh", "before"}, {"gate-up", "interleaved"}},
          {{"frozen", "yes"}, {"weigh", "before"}, {"bias", "all"}, {"save", "input"}}};
}

/// Routings to one expert, to none that is here, to the last, all different, and to some that are
/// not here.
std::map<std::string, std::vector<float>> routings_of(const MoeSizes& sizes) {
  const auto rows = static_cast<std::size_t>(sizes.m * sizes.choices);
  const auto drawn = draw_routing({1}, sizes.m, sizes.experts, sizes.choices, 3);
  std::map<std::string, std::vector<float>> routings;
  routings["none"] = std::vector<float>(rows, -1);
  routings["beyond"] = std::vector<float>(rows, static_cast<float>(sizes.experts));
  auto& one = routings["one"] = std::vector<float>(rows, -1);
  auto& last = routings["last"] = one;
  auto& some = routings["some"] = one;
  auto& twice = routings["twice"] = one;
  for (std::size_t i = 0; i < rows; ++i) {
    const bool first = i % static_cast<std::size_t>(sizes.choices) == 0;
    if (first) one[i] = 0;
    if (first) last[i] = static_cast<float>(sizes.experts - 1);
    some[i] = i % 3 == 0 ? -1 : static_cast<float>(drawn[i]);
    twice[i] = static_cast<float>(drawn[i - i % static_cast<std::size_t>(sizes.choices)]);
  }
  return routings;
}

/// Recipes under routings that no verification draws, against the fallbacks.
void compare_recipes(Backend& backend, const Problem& problem, const MoeSizes& sizes,
                     const std::vector<Recipe>& recipes) {
  const Op& op = moe_ffn_op();
  std::vector<Program> programs;
  for (const Recipe& recipe : recipes)
    for (const Variant& variant : recipe)
      programs.push_back(
          family_of(op, variant.family).program(problem, backend.facts(), variant.config));
  compile_all(backend, programs);
  for (const auto& [name, ids] : routings_of(sizes)) {
    OpRun expected(backend, op, problem);
    expected.set("ids", ids);
    expected.run(op, problem, fallback_recipe(op, problem, backend.facts()));
    for (const Recipe& recipe : recipes) {
      OpRun own(backend, op, problem);
      own.set("ids", ids);
      own.run(op, problem, recipe);
      for (const TensorSpec& spec : op.tensors(problem)) {
        if (spec.role != Role::output) continue;
        CAPTURE(problem.text(), name, spec.name, recipe_text(recipe));
        const auto values = own.values(spec.name), others = expected.values(spec.name);
        double difference = 0, norm = 0;
        for (std::size_t i = 0; i < values.size(); ++i) {
          difference += std::pow(static_cast<double>(values[i]) - others[i], 2);
          norm += std::pow(static_cast<double>(others[i]), 2);
        }
        CHECK(std::sqrt(difference) <= 0.02 * std::sqrt(norm));
      }
    }
  }
}

}  // namespace

TEST_CASE("the mixture on the CPU") {
  const auto backend = open_cpu();
  std::mt19937_64 random(1);
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const char* routing : {"uniform", "zipf:2"})
      for (const MoeSizes& sizes :
           {MoeSizes{1, 24, 40, 6, 3}, MoeSizes{37, 40, 24, 5, 2}, MoeSizes{9, 7, 5, 3, 1}})
        verify(*backend, moe_problem(sizes, dtype, DeviceKind::cpu, {{"routing", routing}}), random,
               2);
}

TEST_CASE("weights before, packed weights, biases and shared experts on the CPU") {
  const auto backend = open_cpu();
  std::mt19937_64 random(8);
  for (const Options& options : forward_forms())
    for (const MoeSizes& sizes : {MoeSizes{5, 24, 40, 6, 3}, MoeSizes{21, 7, 5, 3, 2, 2}})
      verify(*backend, moe_problem(sizes, DType::f32, DeviceKind::cpu, options), random, 1);
  verify(*backend, moe_problem({9, 24, 16, 4, 2, 1}, DType::bf16, DeviceKind::cpu), random, 1);
}

std::vector<Options> fp8_forms() {
  return {{},
          {{"scales", "token"}},
          {{"scales", "block"}},
          {{"scales", "tensor"}, {"gate-up", "halves"}, {"save", "preact"}},
          {{"scales", "token"}, {"gate-up", "halves"}, {"bias", "all"}, {"act", "swiglu-oai"}},
          {{"scales", "block"}, {"weigh", "before"}, {"save", "preact"}}};
}

TEST_CASE("the mixture in fp8 on the CPU") {
  const auto backend = open_cpu();
  std::mt19937_64 random(10);
  for (const Options& options : fp8_forms())
    for (const MoeSizes& sizes : {MoeSizes{5, 136, 264, 6, 3, 1}, MoeSizes{19, 40, 24, 3, 2}})
      verify(*backend, moe_problem(sizes, DType::fp8, DeviceKind::cpu, options), random, 0);
  verify(*backend,
         moe_problem({7, 200, 256, 4, 2}, DType::fp8, DeviceKind::cpu,
                     {{"scales", "block"}, {"gate-up", "halves"}}),
         random, 0);
}

TEST_CASE("the mixture's backward pass on the CPU") {
  const auto backend = open_cpu();
  std::mt19937_64 random(2);
  for (const Options& options : backward_forms())
    for (const MoeSizes& sizes :
         {MoeSizes{1, 24, 40, 6, 3}, MoeSizes{21, 40, 24, 5, 2}, MoeSizes{11, 7, 5, 3, 2, 2}})
      verify(*backend, moe_problem(sizes, DType::f32, DeviceKind::cpu, options, "bwd"), random, 1);
  verify(*backend, moe_problem({13, 24, 40, 6, 3, 1}, DType::bf16, DeviceKind::cpu, {}, "bwd"),
         random, 1);
}

TEST_CASE("the router on the CPU") {
  const auto backend = open_cpu();
  std::mt19937_64 random(3);
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Problem& problem : router_problems(DeviceKind::cpu, dtype))
      verify(*backend, problem, random, 0);
}

TEST_CASE("routings to one expert, to none, and to the same one twice on the CPU") {
  const auto backend = open_cpu();
  const MoeSizes sizes{11, 24, 16, 5, 3};
  const MoeSizes with_shared{11, 24, 16, 5, 3, 2};
  const Problem before =
      moe_problem(with_shared, DType::f32, DeviceKind::cpu, {{"weigh", "before"}});
  compare_recipes(*backend, before, with_shared,
                  {default_recipe(moe_ffn_op(), before, backend->facts())});
  for (const Options& options : {Options{{"bias", "all"}}, Options{{"weigh", "before"}}}) {
    const Problem backward = moe_problem(with_shared, DType::f32, DeviceKind::cpu, options, "bwd");
    compare_recipes(*backend, backward, with_shared,
                    {default_recipe(moe_ffn_op(), backward, backend->facts())});
  }
  for (const char* pass : {"fwd", "bwd"}) {
    const Problem problem = moe_problem(sizes, DType::f32, DeviceKind::cpu, {}, pass);
    compare_recipes(*backend, problem, sizes,
                    {default_recipe(moe_ffn_op(), problem, backend->facts())});
  }
}

namespace {

/// Few of the scores are finite, as where experts are masked: those that are chosen differ all the
/// same, and the first of equal ones come first.
void route_few_finite(Backend& backend) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  const Op& op = moe_route_op();
  const auto chosen = [&](Options options, const std::vector<float>& logits,
                          const std::vector<float>& bias) {
    const Problem problem = canonical(
        op, {"moe-route", "fwd", DType::f32, {{"m", 1}, {"experts", 4}, {"top-k", 3}}, options},
        backend.facts().kind);
    OpRun run(backend, op, problem);
    run.set("logits", logits);
    if (!bias.empty()) run.set("bias", bias);
    run.run(op, problem, default_recipe(op, problem, backend.facts()));
    return std::pair(run.values("ids"), run.values("weights"));
  };
  using Values = std::vector<float>;
  for (const Options& options : {Options{}, Options{{"order", "after"}}}) {
    const auto [ids, weights] = chosen(options, {none, none, 5, none}, {});
    CHECK(ids == Values{2, 0, 1});
    CHECK(weights == Values{1, 0, 0});
  }
  CHECK(
      chosen({{"score", "sigmoid"}, {"bias", "yes"}}, {1, 2, 3, 4}, {none, 0, none, none}).first ==
      Values{1, 0, 2});
  CHECK(chosen({}, {none, 1, none, 7}, {}).first == Values{3, 1, 0});
  // Sigmoids that all underflow have no sum to be divided by.
  const Options of_sum = {{"score", "sigmoid"}, {"renormalise", "yes"}};
  CHECK(chosen(of_sum, {-200, none, -150, -300}, {}) ==
        std::pair(Values{2, 0, 3}, Values{0, 0, 0}));
  // Three scores of 1e-6, whose sum another one joins.
  Options of_more = of_sum;
  of_more["sum-eps"] = "1e-06";
  const float millionth = -13.8155f;
  for (const float weight : chosen(of_more, {millionth, millionth, millionth, none}, {}).second)
    CHECK(std::abs(weight - 0.25f) < 1e-5f);
}

}  // namespace

TEST_CASE("the router's experts differ where few scores are finite") {
  route_few_finite(*open_cpu());
}

TEST_CASE("the router's experts differ where few scores are finite, on a GPU", "[gpu]") {
  on_first_cuda(route_few_finite);
}

TEST_CASE("experts that are not here add nothing to the router's gradient") {
  const auto backend = open_cpu();
  const Op& op = moe_route_op();
  for (const Options& options :
       {Options{}, Options{{"order", "after"}}, Options{{"score", "sigmoid"}},
        Options{{"score", "sigmoid"}, {"renormalise", "yes"}}}) {
    const Problem problem = canonical(
        op, {"moe-route", "bwd", DType::f32, {{"m", 2}, {"experts", 5}, {"top-k", 2}}, options},
        DeviceKind::cpu);
    OpRun run(*backend, op, problem);
    run.set("ids", {-1, 5, -1, 3});
    run.run(op, problem, default_recipe(op, problem, backend->facts()));
    const auto gradient = run.values("d_logits");
    for (int i = 0; i < 5; ++i) CHECK(gradient[static_cast<std::size_t>(i)] == 0);
    for (const float each : gradient) CHECK(std::isfinite(each));
  }
}

namespace {

/// Ids of a file: some, or all, are of experts that are not here, or twice the same for a token.
/// Some rows of the sorted order then belong to no expert, and nobody writes them.
void verify_recorded_ids(Backend& backend, DType dtype, const MoeSizes& sizes) {
  const testing::TemporaryFolder folder;
  std::mt19937_64 random(14);
  for (const char* ids : {"0 -1 2 2 -1 -1", "-1 -1", "3 -1 1 1 0 2"}) {
    const auto file = folder.path() / "ids.txt";
    std::ofstream(file) << ids;
    for (const auto& [pass, options] : {std::pair{"fwd", Options{{"save", "preact"}}},
                                        {"fwd", {{"bias", "all"}}},
                                        {"bwd", {}},
                                        {"bwd", {{"weigh", "before"}, {"gate-up", "halves"}}}}) {
      Options all = options;
      all["routing"] = "file:" + file.string();
      const Problem problem = moe_problem(sizes, dtype, backend.facts().kind, all, pass);
      INFO(problem.text());
      verify(backend, problem, random, 1);
    }
  }
}

}  // namespace

TEST_CASE("recorded ids of experts that are not here are verified") {
  const auto backend = open_cpu();
  verify_recorded_ids(*backend, DType::f32, {11, 24, 16, 5, 2});
  verify_recorded_ids(*backend, DType::bf16, {5, 32, 40, 4, 2});
}

TEST_CASE("recorded ids of experts that are not here are verified on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  verify_recorded_ids(*backend, DType::bf16, {6, 128, 72, 16, 2});
  verify_recorded_ids(*backend, DType::bf16, {300, 128, 192, 8, 2});
}

TEST_CASE("the mixture on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(4);
  const std::vector<MoeSizes> all{
      {1, 128, 64, 16, 4},    {7, 64, 200, 8, 2},    {30, 256, 128, 40, 8}, {100, 192, 136, 5, 3},
      {777, 256, 320, 12, 4}, {600, 64, 64, 300, 8}, {50, 104, 72, 3, 1}};
  for (const MoeSizes& sizes : all)
    verify(*backend, moe_problem(sizes, DType::bf16, DeviceKind::cuda), random, 1);
  for (const MoeSizes& sizes : {all[1], all[4]})
    verify(*backend, moe_problem(sizes, DType::fp16, DeviceKind::cuda, {{"routing", "zipf:1"}}),
           random, 2);
  for (const MoeSizes& sizes : {MoeSizes{9, 7, 5, 3, 2}, MoeSizes{130, 33, 65, 6, 3}})
    verify(*backend, moe_problem(sizes, DType::f32, DeviceKind::cuda), random, 1);
}

TEST_CASE("weights before, packed weights, biases and shared experts on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(9);
  for (const Options& options : forward_forms()) {
    // Few tokens, where the decode families and swap-AB are; many; and sizes for the fallback
    // alone.
    for (const MoeSizes& sizes : {MoeSizes{6, 128, 72, 16, 4, 1}, MoeSizes{150, 192, 136, 9, 3, 2}})
      verify(*backend, moe_problem(sizes, DType::bf16, DeviceKind::cuda, options), random, 1);
    verify(*backend, moe_problem({20, 7, 5, 3, 2, 1}, DType::f32, DeviceKind::cuda, options),
           random, 0);
  }
  verify(*backend, moe_problem({700, 256, 320, 12, 4, 1}, DType::fp16, DeviceKind::cuda), random,
         1);
}

TEST_CASE("the mixture in fp8 on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(11);
  for (const Options& options : fp8_forms())
    for (const MoeSizes& sizes : {MoeSizes{6, 128, 272, 16, 4, 1}, MoeSizes{150, 208, 384, 9, 3},
                                  MoeSizes{700, 512, 128, 12, 4}})
      verify(*backend, moe_problem(sizes, DType::fp8, DeviceKind::cuda, options), random, 2);
  for (const char* scales : {"tensor", "token", "block"})
    verify(*backend,
           moe_problem({20, 7, 5, 3, 2, 1}, DType::fp8, DeviceKind::cuda, {{"scales", scales}}),
           random, 0);
}

// A selection that a sanitizer gets through in half a minute: each family's default, once.
TEST_CASE("every family of the mixture once on a GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(12);
  const MoeSizes sizes{6, 64, 80, 8, 2, 1};
  const DeviceKind cuda = DeviceKind::cuda;
  for (const Problem& problem :
       {moe_problem(sizes, DType::bf16, cuda, {{"weigh", "before"}, {"bias", "all"}}),
        moe_problem({6, 128, 144, 8, 2}, DType::fp8, cuda, {{"scales", "block"}}),
        moe_problem(sizes, DType::bf16, cuda, {{"gate-up", "interleaved"}, {"bias", "all"}}, "bwd"),
        moe_problem(sizes, DType::bf16, cuda, {{"weigh", "before"}}, "bwd")}) {
    const auto variants = draw_variants(backend->facts(), moe_ffn_op(), problem, random, 0);
    std::vector<Program> programs;
    for (const DrawnVariant& variant : variants)
      programs.push_back(variant.family->program(problem, backend->facts(), variant.config));
    const auto compiled = compile_all(*backend, programs);
    Verifier verifier(*backend, moe_ffn_op(), problem, random());
    for (std::size_t i = 0; i < variants.size(); ++i)
      verify_variant(verifier, variants[i], compiled[i]);
  }
}

TEST_CASE("many choices are sorted on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(5);
  for (const char* routing : {"uniform", "zipf:2"})
    for (const MoeSizes& sizes : {MoeSizes{16384, 8, 8, 128, 8}, MoeSizes{5000, 8, 8, 1024, 32},
                                  MoeSizes{4097, 8, 8, 2, 1}}) {
      const Problem problem =
          moe_problem(sizes, DType::bf16, DeviceKind::cuda, {{"routing", routing}});
      const Family& family = family_of(moe_ffn_op(), "route_sort");
      Verifier verifier(*backend, moe_ffn_op(), problem, random());
      const auto configs = family.space(problem, backend->facts()).feasible();
      std::vector<Program> programs;
      for (const Config& config : configs)
        programs.push_back(family.program(problem, backend->facts(), config));
      const auto compiled = compile_all(*backend, programs);
      for (std::size_t i = 0; i < configs.size(); ++i)
        verify_variant(verifier, {&family, configs[i], 0, 1}, compiled[i]);
    }
}

TEST_CASE("the mixture's backward pass on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(6);
  for (const Options& options : backward_forms()) {
    for (const MoeSizes& sizes : {MoeSizes{3, 64, 128, 8, 2}, MoeSizes{300, 256, 72, 33, 8, 1}})
      verify(*backend, moe_problem(sizes, DType::bf16, DeviceKind::cuda, options, "bwd"), random,
             1);
    verify(*backend, moe_problem({20, 7, 5, 3, 2, 1}, DType::f32, DeviceKind::cuda, options, "bwd"),
           random, 0);
  }
  verify(*backend, moe_problem({130, 64, 136, 5, 3}, DType::fp16, DeviceKind::cuda, {}, "bwd"),
         random, 1);
}

TEST_CASE("the router on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(7);
  std::vector<Problem> problems = router_problems(DeviceKind::cuda, DType::f32);
  for (const DType dtype : {DType::bf16, DType::fp16}) {
    const auto more = router_problems(DeviceKind::cuda, dtype);
    problems.insert(problems.end(), more.begin(), more.begin() + 3);
    problems.push_back(more[10]);  // backward
  }
  std::vector<Program> programs;
  for (const Problem& problem : problems)
    for (const Variant& variant : default_recipe(moe_route_op(), problem, backend->facts()))
      programs.push_back(family_of(moe_route_op(), variant.family)
                             .program(problem, backend->facts(), variant.config));
  compile_all(*backend, programs);
  for (const Problem& problem : problems) verify(*backend, problem, random, 0);
}

TEST_CASE("routings to one expert, to none, and to the same one twice on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const DeviceFacts& facts = backend->facts();
  for (const MoeSizes& sizes : {MoeSizes{11, 128, 64, 16, 3}, MoeSizes{300, 128, 192, 8, 2},
                                MoeSizes{70, 64, 128, 16, 3, 2}})
    for (const auto& [pass, options] : {std::pair{"fwd", Options{}}, {"bwd", {{"bias", "all"}}}}) {
      const Problem problem = moe_problem(sizes, DType::bf16, DeviceKind::cuda, options, pass);
      const Op& op = moe_ffn_op();
      // Each GEMM family in the place of the fallback.
      const Recipe fallbacks = fallback_recipe(op, problem, facts);
      std::vector<Recipe> recipes{default_recipe(op, problem, facts)};
      for (const Family* family : op.families()) {
        if (family->device_kind() != facts.kind || family->refusal(problem, facts) ||
            family->stages().size() != 1)
          continue;
        Recipe recipe = fallbacks;
        for (Variant& variant : recipe)
          if (family_of(op, variant.family).stages() == family->stages())
            variant = {std::string(family->name()), family->default_config(problem, facts)};
        recipes.push_back(std::move(recipe));
      }
      compare_recipes(*backend, problem, sizes, recipes);
    }
}

namespace {

void check_moe_baselines(Backend& backend, DType dtype, double tolerance) {
  const DeviceKind kind = backend.facts().kind;
  // A product for each choice, and one for each expert.
  for (const MoeSizes& sizes : {MoeSizes{1, 40, 24, 9, 2}, MoeSizes{3, 64, 32, 40, 3, 1},
                                MoeSizes{7, 40, 24, 5, 3, 2}, MoeSizes{30, 36, 20, 4, 1}})
    for (const auto& options : std::vector<std::map<std::string, std::string>>{
             {}, {{"gate-up", "halves"}}, {{"residual", "yes"}, {"act", "gelu"}}})
      check_baselines(backend, moe_ffn_op(), moe_problem(sizes, dtype, kind, options), tolerance);
}

}  // namespace

TEST_CASE("a mixture's baselines write the same") {
  const auto backend = open_cpu();
  check_moe_baselines(*backend, DType::f32, 1e-5);
  check_moe_baselines(*backend, DType::bf16, 2e-2);
  const auto none = [&](const std::map<std::string, std::string>& options) {
    return moe_ffn_op()
        .baselines(moe_problem({4, 16, 8, 4, 2}, DType::bf16, DeviceKind::cpu, options),
                   backend->facts())
        .empty();
  };
  CHECK_FALSE(none({}));
  for (const auto& [name, value] : std::map<std::string, std::string>{{"save", "preact"},
                                                                      {"weigh", "before"},
                                                                      {"bias", "all"},
                                                                      {"gate-up", "interleaved"},
                                                                      {"act", "swiglu-oai"}})
    CHECK(none({{name, value}}));
}

TEST_CASE("on a GPU too, a mixture's baselines write the same", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const DType dtype : {DType::bf16, DType::fp16, DType::f32})
    check_moe_baselines(*backend, dtype, dtype == DType::f32 ? 1e-4 : 2e-2);
}
