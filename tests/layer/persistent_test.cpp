// The persistent family: what it refuses, and on a GPU layers of few tokens against the float64
// reference.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <set>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/dtype.hpp"
#include "device/facts.hpp"
#include "kernels/layer/persistent.cuh"
#include "kernels/layer/persistent_space.hpp"
#include "layer/problems.hpp"
#include "runtime/choice.hpp"
#include "runtime/plan.hpp"
#include "store/example.hpp"
#include "support/op_run.hpp"
#include "support/temporary_folder.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

constexpr const char* persistent = "persistent";
constexpr const char* with_experts = "persistent_experts";
constexpr const char* with_ranks = "persistent_ranks";

Problem persistent_problem(DType dtype, Sizes more, Options options = {}) {
  Sizes sizes{{"batch", 1},    {"d", 512},  {"h", 1056},   {"heads", 16},
              {"kv-heads", 8}, {"dim", 64}, {"cache", 100}};
  for (const auto& [name, value] : more) sizes[name] = value;
  return layer_problem(DeviceKind::cuda, dtype, std::move(sizes), std::move(options));
}

std::string packed_family(const Problem& problem) {
  if (problem.has("post-norms", "yes")) return "persistent_packed_post_norms";
  const char* attention = problem.has("attn-weights", "dense") ? "_ffn" : "";
  const char* network = !layer::has_experts(problem)          ? ""
                        : !problem.sizes.contains("shared-h") ? "_experts"
                        : problem.has("shared-gate", "yes")   ? "_weighted"
                                                              : "_shared";
  return std::string("persistent_packed") + attention + network;
}
const Family& family_for(const Problem& problem) {
  if (problem.options.contains("weights")) return family_of(layer_op(), packed_family(problem));
  return family_of(layer_op(), problem.sizes.contains("ranks") ? with_ranks
                               : problem.has("post-norms", "yes") && !layer::has_experts(problem)
                                   ? "persistent_post_norms"
                               : !layer::has_experts(problem)        ? persistent
                               : !problem.sizes.contains("shared-h") ? with_experts
                               : problem.has("shared-gate", "yes")   ? "persistent_weighted"
                                                                     : "persistent_shared");
}

std::string refusal_of(const Problem& problem, const char* arch = "sm_90a") {
  return family_for(problem).refusal(problem, facts_of_architecture(arch)).value_or("");
}

/// Every size and option that the kernel has a case for.
struct Use {
  DType dtype;
  Sizes sizes;
  Options options;
};
std::vector<Use> uses_of_dense() {
  return {
      {DType::bf16, {}, {}},
      {DType::bf16, {{"batch", 8}, {"cache", 333}}, {{"lengths", "ragged"}}},
      {DType::fp16, {{"batch", 3}, {"cache", 2500}}, {{"lengths", "ragged"}}},
      {DType::bf16,
       {{"dim", 128}, {"kv-heads", 4}, {"batch", 5}},
       {{"qk-norm", "yes"}, {"lengths", "ragged"}}},
      {DType::fp16, {{"kv-heads", 2}, {"batch", 2}}, {{"qkv-bias", "yes"}, {"angles", "table"}}},
      {DType::bf16,
       {{"kv-heads", 16}, {"batch", 4}},
       {{"convention", "gemma"}, {"act", "gelu-tanh"}, {"scale", "0.0625"}}},
      {DType::bf16, {{"h", 4352}, {"batch", 7}}, {{"convention", "t5"}, {"rotation", "none"}}},
      {DType::bf16,
       {{"batch", 3}, {"cache", 1000}, {"page", 16}},
       {{"lengths", "ragged"}, {"qkv-weights", "packed"}, {"qkv-bias", "yes"}}},
      {DType::fp16,
       {{"batch", 8}, {"cache", 5000}, {"page", 64}, {"pages", 40}, {"kv-heads", 4}, {"dim", 128}},
       {{"lengths", "ragged"}}},
      {DType::bf16, {{"cache", 77}, {"page", 256}}, {{"qkv-weights", "packed"}}},
      // Several tokens of a sequence.
      {DType::bf16, {{"s", 5}, {"cache", 333}}, {}},
      {DType::fp16, {{"s", 2}, {"batch", 3}, {"cache", 40}}, {{"lengths", "ragged"}}},
      {DType::bf16, {{"s", 8}, {"cache", 2500}, {"kv-heads", 4}}, {{"qkv-bias", "yes"}}},
      {DType::bf16, {{"s", 8}, {"cache", 8}, {"kv-heads", 4}}, {{"rotation", "none"}}},
      {DType::fp16,
       {{"s", 4}, {"batch", 2}, {"cache", 1000}, {"page", 16}, {"dim", 128}, {"kv-heads", 4}},
       {{"lengths", "ragged"}, {"qk-norm", "yes"}}},
      {DType::bf16,
       {{"s", 3}, {"batch", 2}, {"cache", 200}, {"page", 64}, {"kv-heads", 2}},
       {{"lengths", "ragged"}, {"angles", "table"}}},
      // Windows, sinks, biases, heads that are rotated in part, and many heads of one of k.
      {DType::bf16, {{"cache", 333}, {"window", 100}}, {{"sinks", "yes"}}},
      {DType::fp16,
       {{"batch", 5}, {"cache", 1000}, {"page", 16}, {"window", 130}},
       {{"lengths", "ragged"}, {"out-bias", "yes"}, {"qkv-bias", "yes"}}},
      {DType::bf16,
       {{"s", 5}, {"cache", 400}, {"page", 64}, {"window", 33}, {"kv-heads", 4}},
       {{"sinks", "yes"}, {"out-bias", "yes"}}},
      {DType::bf16, {{"batch", 2}, {"dim", 128}, {"kv-heads", 1}, {"rotary", 64}}, {}},
      // Keys and values of a head side by side.
      {DType::bf16,
       {{"batch", 3}, {"cache", 500}, {"page", 16}, {"kv-heads", 4}, {"kv-head", 128}},
       {{"lengths", "ragged"}}},
      // Activations of down in several parts, which are asked for ahead.
      {DType::bf16, {{"h", 4352}, {"batch", 4}, {"cache", 40}}, {{"lengths", "ragged"}}},
      {DType::fp16, {{"h", 4352}, {"s", 5}, {"cache", 40}}, {}}};
}
/// And with experts.
std::vector<Use> uses_of_experts() {
  const auto use = [](DType dtype, Sizes sizes, Options options) {
    sizes.insert({{"h", 160}, {"experts", 20}, {"top-k", 8}});
    options.insert({"ffn", "moe"});
    return Use{dtype, std::move(sizes), std::move(options)};
  };
  return {
      use(DType::bf16, {{"h", 768}, {"experts", 12}},
          {{"renormalise", "yes"}, {"gate-up", "halves"}}),
      use(DType::bf16, {{"experts", 128}, {"dim", 128}, {"kv-heads", 4}},
          {{"renormalise", "yes"}, {"gate-up", "halves"}, {"qk-norm", "yes"}}),
      use(DType::fp16, {{"batch", 3}, {"h", 416}, {"experts", 6}, {"top-k", 2}, {"shared", 1}},
          {{"lengths", "ragged"}, {"order", "after"}, {"routing", "zipf:1"}}),
      use(DType::bf16, {{"batch", 2}, {"s", 2}, {"experts", 150}, {"top-k", 5}},
          {{"score", "sigmoid"},
           {"choice-bias", "yes"},
           {"logits", "f32"},
           {"route-scale", "2.5"},
           {"renormalise", "yes"},
           {"lengths", "ragged"}}),
      use(DType::bf16, {{"batch", 8}, {"cache", 300}, {"page", 16}},
          {{"router-bias", "yes"}, {"act", "gelu"}, {"qkv-weights", "packed"}}),
      // As of gpt-oss.
      use(DType::bf16, {{"batch", 2}, {"cache", 300}, {"window", 128}, {"top-k", 4}},
          {{"order", "after"},
           {"act", "swiglu-oai"},
           {"gate-up", "interleaved"},
           {"router-bias", "yes"},
           {"sinks", "yes"},
           {"qkv-bias", "yes"},
           {"out-bias", "yes"},
           {"ffn-bias", "yes"}}),
      // A shared MLP (shared-h) with weights of its own; with a gate, and with biases of experts.
      use(DType::bf16, {{"batch", 2}, {"shared-h", 160}},
          {{"score", "sigmoid"},
           {"choice-bias", "yes"},
           {"logits", "f32"},
           {"renormalise", "yes"},
           {"gate-up", "halves"}}),
      use(DType::fp16, {{"batch", 3}, {"shared-h", 640}, {"top-k", 2}, {"shared", 1}},
          {{"shared-gate", "yes"}, {"ffn-bias", "yes"}, {"gate-up", "halves"}}),
      use(DType::bf16, {{"s", 3}, {"shared-h", 320}, {"cache", 200}},
          {{"shared-gate", "yes"}, {"ffn-bias", "yes"}})};
}

/// And with norms behind the parts, soft caps, wide heads and a scaled residual.
std::vector<Use> uses_of_norms_behind() {
  const auto gemma = [](Sizes sizes, Options options) {
    sizes.insert({{"dim", 256}, {"heads", 8}, {"kv-heads", 2}});
    options.insert({{"convention", "gemma"}, {"post-norms", "yes"}, {"act", "gelu-tanh"}});
    return Use{DType::bf16, std::move(sizes), std::move(options)};
  };
  return {gemma({{"batch", 3}, {"window", 60}, {"cache", 200}},
                {{"softcap", "5"}, {"lengths", "ragged"}}),
          gemma({{"s", 2}}, {{"qk-norm", "yes"}, {"out-bias", "yes"}}),
          gemma({{"h", 1152}, {"batch", 2}}, {{"weights", "int4"}, {"qk-norm", "yes"}}),
          {DType::fp16, {{"batch", 2}}, {{"post-norms", "yes"}, {"softcap", "3"}}}};
}

/// And a rank's slice, which plays its peer too.
std::vector<Use> uses_of_ranks() {
  return {{DType::bf16, {{"ranks", 2}}, {}},
          {DType::fp16,
           {{"ranks", 2}, {"batch", 2}, {"cache", 333}, {"kv-heads", 4}},
           {{"lengths", "ragged"}, {"convention", "gemma"}}},
          {DType::bf16,
           {{"ranks", 2}, {"batch", 5}, {"page", 16}, {"dim", 128}, {"kv-heads", 4}},
           {{"lengths", "ragged"}, {"qk-norm", "yes"}}}};
}

/// And with factors of what is added to the residual stream, as Granite has.
std::vector<Use> uses_of_factors() {
  return {{DType::bf16, {{"batch", 7}}, {{"residual-scale", "yes"}, {"out-bias", "yes"}}},
          {DType::fp16, {{"h", 2176}}, {{"residual-scale", "yes"}, {"weights", "int4"}}}};
}
/// And with packed weights: of 4 bits, of 8, and of experts.
std::vector<Use> uses_of_4_bits() {
  return {{DType::bf16, {{"d", 1024}, {"h", 4352}}, {{"weights", "int4"}}},
          {DType::fp16,
           {{"h", 1088}, {"batch", 8}, {"cache", 333}},
           {{"weights", "int4"}, {"group", "32"}, {"zeros", "yes"}, {"lengths", "ragged"}}},
          {DType::bf16,
           {{"h", 4352}, {"batch", 5}, {"cache", 300}, {"page", 16}},
           {{"weights", "int4"}, {"group", "row"}, {"zeros", "yes"}, {"qkv-bias", "yes"}}},
          {DType::bf16,
           {{"h", 1088}, {"s", 3}, {"cache", 200}, {"dim", 128}, {"kv-heads", 4}},
           {{"weights", "mxfp4"}, {"qk-norm", "yes"}}},
          {DType::fp16,
           {{"h", 2176}, {"batch", 2}},
           {{"weights", "nvfp4"}, {"out-bias", "yes"}, {"lengths", "ragged"}}}};
}
std::vector<Use> uses_of_8_bits() {
  return {{DType::bf16, {{"h", 2176}, {"cache", 300}}, {{"weights", "fp8"}}},
          {DType::fp16,
           {{"h", 1088}, {"batch", 4}},
           {{"weights", "fp8"}, {"group", "row"}, {"attn-weights", "dense"}}},
          {DType::bf16,
           {{"h", 1088}, {"batch", 3}, {"window", 50}},
           {{"weights", "int8"}, {"group", "64"}, {"sinks", "yes"}}}};
}
std::vector<Use> uses_of_packed_experts() {
  const auto use = [](DType dtype, Sizes sizes, Options options) {
    sizes.insert({{"h", 192}, {"experts", 20}, {"top-k", 4}});
    options.insert({"ffn", "moe"});
    return Use{dtype, std::move(sizes), std::move(options)};
  };
  const auto gpt_oss = [&](Sizes sizes, Options options) {
    options.insert({{"weights", "mxfp4"},
                    {"attn-weights", "dense"},
                    {"order", "after"},
                    {"act", "swiglu-oai"},
                    {"router-bias", "yes"},
                    {"sinks", "yes"},
                    {"qkv-bias", "yes"},
                    {"out-bias", "yes"},
                    {"ffn-bias", "yes"}});
    return use(DType::bf16, std::move(sizes), std::move(options));
  };
  return {use(DType::bf16, {{"d", 1024}, {"h", 768}, {"shared", 1}},
              {{"weights", "int4"}, {"renormalise", "yes"}, {"qk-norm", "yes"}}),
          use(DType::fp16, {{"batch", 5}, {"cache", 200}, {"page", 16}},
              {{"weights", "int4"}, {"group", "32"}, {"zeros", "yes"}, {"lengths", "ragged"}}),
          use(DType::bf16, {{"s", 8}, {"h", 320}, {"cache", 70}, {"top-k", 3}, {"kv-heads", 4}},
              {{"weights", "int4"}, {"group", "row"}, {"zeros", "yes"}, {"routing", "zipf:1"}}),
          gpt_oss({{"d", 576}, {"h", 704}, {"cache", 300}, {"window", 128}, {"page", 16}}, {}),
          gpt_oss({{"batch", 5}, {"cache", 300}, {"window", 33}}, {{"lengths", "ragged"}}),
          gpt_oss({{"batch", 2}, {"s", 2}, {"heads", 64}, {"cache", 100}}, {{"lengths", "ragged"}}),
          use(DType::fp16, {{"batch", 2}, {"shared-h", 384}}, {{"weights", "nvfp4"}}),
          use(DType::bf16, {{"s", 3}, {"h", 1088}, {"cache", 90}}, {{"weights", "nvfp4"}}),
          use(DType::bf16, {{"batch", 2}, {"shared-h", 192}},
              {{"weights", "int8"}, {"group", "64"}, {"shared-gate", "yes"}}),
          use(DType::bf16, {{"batch", 8}, {"h", 256}, {"shared-h", 768}, {"top-k", 2}},
              {{"weights", "fp8"}, {"shared-gate", "yes"}, {"lengths", "ragged"}}),
          use(DType::fp16, {{"batch", 2}},
              {{"weights", "fp8"}, {"group", "row"}, {"score", "sigmoid"}}),
          // Two stages of down's rows, and blocks without a tile of it.
          use(DType::bf16, {{"d", 2048}, {"h", 2176}, {"experts", 8}, {"top-k", 2}},
              {{"weights", "int4"}}),
          // Several tokens, whose tiles of down are not shared.
          gpt_oss({{"d", 2240}, {"batch", 3}, {"cache", 70}},
                  {{"lengths", "ragged"}, {"logits", "f32"}}),
          // More tiles of down than blocks, whose parts are shared out.
          gpt_oss({{"d", 2240}, {"h", 704}}, {}),
          use(DType::fp16, {{"d", 2304}, {"shared-h", 384}, {"cache", 70}},
              {{"weights", "int4"}, {"group", "32"}})};
}
constexpr std::size_t first_of_shared_tiles = 13;

void verify_persistent(Backend& backend, const Use& use, std::int64_t layers,
                       const Config& config) {
  Sizes sizes = use.sizes;
  sizes["layers"] = layers;
  const Problem problem = persistent_problem(use.dtype, sizes, use.options);
  const Plan plan(backend, layer_op(), problem,
                  {{std::string(family_for(problem).name()), config}});
  CAPTURE(problem.text(), config.text());
  CHECK(plan.executables().size() == 1);
  Verifier verifier(backend, layer_op(), problem, 7);
  const auto result = verifier.verify(0, layer_op().stages(problem).size(), plan.executables());
  CAPTURE(result.failure, result.error, result.tolerance);
  CHECK(result.passed);
}

/// Uses [first, last): a layer by the default configuration, five by a random one, and two whose
/// heads are shared out among blocks, with stages in registers.
void verify_uses(const std::vector<Use>& all, std::size_t first, std::size_t last) {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(11 + first);
  for (std::size_t i = first; i < last; ++i) {
    const Problem problem = persistent_problem(all[i].dtype, all[i].sizes, all[i].options);
    const Family& family = family_for(problem);
    if (const auto reason = family.refusal(problem, backend->facts())) return;
    const auto feasible = family.space(problem, backend->facts()).feasible();
    verify_persistent(*backend, all[i], 1, family.default_config(problem, backend->facts()));
    verify_persistent(*backend, all[i], 5, feasible[random() % feasible.size()]);
    Config shared = family.default_config(problem, backend->facts());
    for (const int groups : {2, 4}) {
      Config more = shared;
      more.set("head_groups", groups);
      if (family.space(problem, backend->facts()).violations(more).empty()) shared = more;
    }
    shared.set("held", shared.get("held") == 0 ? 2 : 0);
    verify_persistent(*backend, all[i], 2, shared);
  }
}

std::vector<Use> all_uses() {
  std::vector<Use> all;
  for (const auto& more :
       {uses_of_dense(), uses_of_experts(), uses_of_ranks(), uses_of_norms_behind(),
        uses_of_factors(), uses_of_4_bits(), uses_of_8_bits(), uses_of_packed_experts()})
    all.insert(all.end(), more.begin(), more.end());
  return all;
}

/// Each expert's down is NaN in turn: tokens that chose it are NaN, and others keep their bits.
void verify_nan_experts(Backend& backend, const Problem& problem, const Recipe& recipe) {
  CAPTURE(problem.text(), recipe_text(recipe));
  OpRun run(backend, layer_op(), problem);
  const auto executables = run.compile(layer_op(), problem, recipe);
  run.run(executables);
  const std::vector<float> expected = run.values("y");
  REQUIRE(std::none_of(expected.begin(), expected.end(), [](float v) { return std::isnan(v); }));
  const char* const down = problem.options.contains("weights") ? "w_down_scale" : "w_down";
  const auto weights = run.bytes(down);
  const auto experts = static_cast<std::size_t>(problem.size("experts")),
             d = static_cast<std::size_t>(problem.size("d")), share = weights.size() / experts;
  std::size_t choices = 0;
  for (std::size_t expert = 0; expert < experts; ++expert) {
    auto changed = weights;
    std::fill_n(changed.begin() + static_cast<std::ptrdiff_t>(expert * share), share,
                std::byte{0xff});
    run.write(down, changed);
    run.run(executables);
    const std::vector<float> y = run.values("y");
    for (std::size_t token = 0; token < y.size(); token += d) {
      const auto own = y.begin() + static_cast<std::ptrdiff_t>(token);
      const auto end = own + static_cast<std::ptrdiff_t>(d);
      if (std::all_of(own, end, [](float value) { return std::isnan(value); }))
        ++choices;
      else
        CHECK(std::equal(own, end, expected.begin() + static_cast<std::ptrdiff_t>(token)));
    }
  }
  CHECK(choices == expected.size() / d * static_cast<std::size_t>(problem.size("top-k")));
}

/// Experts of several tokens, dense and packed.
std::vector<Use> uses_of_nan_experts() {
  return {uses_of_experts()[4], uses_of_packed_experts()[1], uses_of_packed_experts()[4]};
}

}  // namespace

TEST_CASE("the persistent family says what it cannot compute") {
  CHECK(refusal_of(persistent_problem(DType::bf16, {})).empty());
  for (const Use& use : all_uses())
    CHECK(refusal_of(persistent_problem(use.dtype, use.sizes, use.options)).empty());

  const auto refuses = [](const Problem& problem, const char* reason, const char* arch = "sm_90a") {
    CAPTURE(problem.text());
    CHECK(refusal_of(problem, arch).find(reason) != std::string::npos);
  };
  const auto mixture = [](Sizes sizes, Options options = {}) {
    sizes.insert({{"experts", 16}, {"top-k", 8}});
    options.insert({"ffn", "moe"});
    return persistent_problem(DType::bf16, std::move(sizes), std::move(options));
  };
  refuses(persistent_problem(DType::bf16, {}), "compute capability 9.0", "sm_80");
  refuses(persistent_problem(DType::f32, {}), "bf16 and fp16");
  refuses(persistent_problem(DType::bf16, {{"batch", 9}}), "batch=9");
  refuses(persistent_problem(DType::bf16, {{"batch", 2}, {"s", 5}}), "10 tokens");
  refuses(persistent_problem(DType::bf16, {{"s", 8}, {"kv-heads", 2}}), "64 heads of new tokens");
  refuses(persistent_problem(DType::bf16, {{"dim", 96}}), "dim=96");
  refuses(persistent_problem(DType::bf16, {{"rotary", 32}}), "a multiple of 64 features");
  refuses(persistent_problem(DType::bf16, {{"kv-heads", 1}, {"heads", 64}}),
          "64 heads of new tokens");
  refuses(persistent_problem(DType::bf16, {{"h", 1048}}), "1048 elements");
  refuses(persistent_problem(DType::bf16, {{"d", 96}}), "96 rows");
  refuses(persistent_problem(DType::bf16, {}, {{"rotation", "interleaved"}}), "halves");
  refuses(persistent_problem(DType::bf16, {}, {{"post-norms", "only"}}), "post-norms=only");
  refuses(mixture({}, {{"post-norms", "yes"}}), "norms behind their parts");
  refuses(persistent_problem(DType::bf16, {}, {{"block", "parallel"}}), "block=parallel");
  refuses(persistent_problem(DType::bf16, {}, {{"norm", "layer"}}), "norm=layer");
  refuses(persistent_problem(DType::bf16, {}, {{"ffn", "plain"}}), "ffn=plain");
  refuses(mixture({}, {{"residual-scale", "yes"}}), "residual-scale=yes: with experts");
  refuses(persistent_problem(DType::bf16, {{"ranks", 2}}, {{"residual-scale", "yes"}}), "factors");
  refuses(persistent_problem(DType::bf16, {}, {{"ffn-bias", "yes"}}), "ffn-bias=yes");
  refuses(persistent_problem(DType::bf16, {{"ranks", 3}}), "slices of two ranks");
  refuses(persistent_problem(DType::bf16, {}, {{"weights", "int4"}, {"group", "32"}}),
          "multiple of 64");
  CHECK(family_of(layer_op(), persistent)
            .refusal(persistent_problem(DType::bf16, {{"h", 1152}}, {{"weights", "int4"}}),
                     facts_of_architecture("sm_90a"))
            .value_or("") == "the layers have packed weights");
  CHECK(
      family_of(layer_op(), persistent)
          .refusal(persistent_problem(DType::bf16, {{"ranks", 2}}), facts_of_architecture("sm_90a"))
          .value_or("")
          .find("ranks=2") != std::string::npos);
  refuses(mixture({{"groups", 4}, {"top-groups", 2}}), "groups=4");
  refuses(mixture({{"shared-h", 64}}), "shared-h=64");
  const auto shared = mixture({{"h", 320}, {"shared-h", 640}});
  CHECK(family_of(layer_op(), with_experts)
            .refusal(shared, facts_of_architecture("sm_90a"))
            .value_or("")
            .find("a shared MLP without a gate") != std::string::npos);
  refuses(mixture({{"experts", 300}}), "experts=300");
  refuses(mixture({{"experts", 40}, {"top-k", 28}, {"shared", 8}}), "36 experts of a token");
  refuses(mixture({{"h", 96}}), "96 rows");
}

TEST_CASE("the one launch has every buffer of every layer among its parameters") {
  const auto facts = facts_of_architecture("sm_90a");
  std::set<std::string_view> families;
  for (const Use& use : all_uses()) {
    Sizes sizes = use.sizes;
    sizes["layers"] = 49;
    const Problem problem = persistent_problem(use.dtype, sizes, use.options);
    const Family& family = family_for(problem);
    if (!families.insert(family.name()).second) continue;
    CAPTURE(problem.text());
    const Program program = family.program(problem, facts, family.default_config(problem, facts));
    std::set<std::size_t> used;
    for (const Step& step : program.steps) {
      const ParameterStruct& parameters = *std::get<KernelLaunch>(step).parameters;
      CHECK(parameters.bytes <= 32764);  // CUDA's limit
      std::set<std::size_t> offsets;
      for (const auto& [offset, value] : parameters.fields) {
        CHECK(offsets.insert(offset).second);
        CHECK(offset + argument_bytes(value) <= parameters.bytes);
        if (const auto* tensor = std::get_if<TensorArgument>(&value)) used.insert(tensor->tensor);
      }
    }
    const auto tensors = layer_op().tensors(problem);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      CAPTURE(tensors[i].name);
      if (tensors[i].role != Role::intermediate) CHECK(used.contains(i));
    }
  }
}

TEST_CASE("a NaN in an expert's weights reaches the tokens that chose it alone, on the CPU") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  for (const Use& use : uses_of_nan_experts()) {
    const Problem cuda = persistent_problem(DType::bf16, use.sizes, use.options);
    const Problem problem = layer_problem(DeviceKind::cpu, cuda.dtype, cuda.sizes, cuda.options);
    verify_nan_experts(*backend, problem, default_recipe(layer_op(), problem, backend->facts()));
  }
}

TEST_CASE("a NaN in an expert's weights reaches the tokens that chose it alone", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const Use& use : uses_of_nan_experts()) {
    const Problem problem = persistent_problem(use.dtype, use.sizes, use.options);
    const Family& family = family_for(problem);
    verify_nan_experts(*backend, problem, default_recipe(layer_op(), problem, backend->facts()));
    if (family.refusal(problem, backend->facts())) continue;
    verify_nan_experts(
        *backend, problem,
        {{std::string(family.name()), family.default_config(problem, backend->facts())}});
  }
}

/// A NaN or an infinity in the last token's row of x: its row of y is NaN, the others keep their
/// bits.
void verify_bad_token(Backend& backend, const Problem& problem, const Recipe& recipe) {
  OpRun run(backend, layer_op(), problem);
  const auto executables = run.compile(layer_op(), problem, recipe);
  run.run(executables);
  const std::vector<float> expected = run.values("y");
  const auto x = run.bytes("x");
  const auto d = static_cast<std::size_t>(problem.size("d")), others = expected.size() - d;
  for (const float value :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    CAPTURE(problem.text(), recipe_text(recipe), value);
    const std::vector<float> bad{value};
    auto changed = x;
    encode(problem.dtype, std::span(bad),
           changed.data() + (others + d / 2) * x.size() / expected.size());
    run.write("x", changed);
    run.run(executables);
    const std::vector<float> y = run.values("y");
    const auto last = y.begin() + static_cast<std::ptrdiff_t>(others);
    CHECK(std::all_of(last, y.end(), [](float each) { return std::isnan(each); }));
    CHECK(std::equal(y.begin(), last, expected.begin()));
  }
}

TEST_CASE("a NaN or an infinity of a token reaches no other token", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const std::size_t at : {1, 4}) {
    const Use use = uses_of_4_bits()[at];
    const Problem problem = persistent_problem(use.dtype, use.sizes, use.options);
    const Family& family = family_for(problem);
    if (family.refusal(problem, backend->facts())) continue;
    verify_bad_token(
        *backend, problem,
        {{std::string(family.name()), family.default_config(problem, backend->facts())}});
  }
}

TEST_CASE("one launch for all layers serves few tokens, even beside records of the parts") {
  const auto facts = facts_of_architecture("sm_90a");
  const auto choice_of = [&](std::int64_t batch) {
    const Problem problem = persistent_problem(
        DType::bf16, {{"batch", batch}, {"d", 2048}, {"h", 8192}, {"layers", 4}});
    const auto parts = layer_op().parts(problem);
    const auto part = std::find_if(parts.begin(), parts.end(),
                                   [](const OpPart& each) { return each.name == "qkv"; });
    REQUIRE(part != parts.end());
    PresetRecord record = example::record(part->problem);
    record.stages.resize(1);
    record.stages[0].stages = {"product"};
    record.stages[0].variant = default_recipe(*part->op, part->problem, facts).front();
    const testing::TemporaryFolder folder;
    merge_preset_records(
        folder.path(),
        {facts.slug(), facts.name, facts.kind, facts.arch, facts.multiprocessors, {}}, "qkv",
        {record});
    return choose(builtin_catalog(), layer_op(), problem, facts,
                  PresetLibrary::load({folder.path()}));
  };
  for (const std::int64_t batch : {1, 2, 4}) {
    const Choice choice = choice_of(batch);
    CAPTURE(choice.reason);
    REQUIRE(choice.recipe.size() == 1);
    CHECK(choice.recipe.front().family == persistent);
    CHECK(choice.reason.find("default of the op") != std::string::npos);
  }
  const Choice choice = choice_of(5);
  CHECK(choice.recipe.size() > 1);
  CHECK(choice.reason.find("records of qkv") != std::string::npos);
}

TEST_CASE(
    "one launch for all layers serves dense layers of up to 6 heads of queries for one of keys") {
  struct Heads {
    const char* model;
    std::int64_t d, h, heads, kv_heads;
    bool in_one_launch;  // was the faster on an H200
  };
  const auto layer = GENERATE(
      Heads{"Llama-3.1-8B", 4096, 14336, 32, 8, true}, Heads{"Qwen3-8B", 4096, 12288, 32, 8, true},
      Heads{"Qwen2.5-7B", 3584, 18944, 28, 4, false}, Heads{"GLM-4-9B", 4096, 13696, 32, 2, false});
  CAPTURE(layer.model);
  const auto facts = facts_of_architecture("sm_90a");
  const Problem problem = persistent_problem(DType::bf16, {{"batch", 1},
                                                           {"d", layer.d},
                                                           {"h", layer.h},
                                                           {"heads", layer.heads},
                                                           {"kv-heads", layer.kv_heads},
                                                           {"dim", 128},
                                                           {"cache", 2048}});
  const auto recipe = choose(builtin_catalog(), layer_op(), problem, facts, {}).recipe;
  CHECK((recipe.front().family == persistent) == layer.in_one_launch);
}

TEST_CASE("one launch for all layers serves few tokens with experts") {
  const auto facts = facts_of_architecture("sm_90a");
  const auto family_of_first = [&](std::int64_t batch, std::int64_t h) {
    const Problem problem = persistent_problem(
        DType::bf16,
        {{"batch", batch}, {"d", 2048}, {"h", h}, {"experts", 128}, {"top-k", 8}, {"layers", 3}},
        {{"ffn", "moe"}});
    return choose(builtin_catalog(), layer_op(), problem, facts, {}).recipe.front().family;
  };
  CHECK(family_of_first(1, 768) == with_experts);
  CHECK(family_of_first(4, 768) == with_experts);
  CHECK(family_of_first(5, 768) != with_experts);
  CHECK(family_of_first(1, 5120) == with_experts);
  CHECK(family_of_first(1, 5152) != with_experts);
}

TEST_CASE("one launch for all layers serves up to five new tokens of a sequence") {
  const auto facts = facts_of_architecture("sm_90a");
  const auto family_of_first = [&](std::int64_t batch, std::int64_t s) {
    const Problem problem = persistent_problem(
        DType::bf16,
        {{"batch", batch}, {"s", s}, {"d", 2048}, {"h", 8192}, {"cache", 512}, {"layers", 3}});
    return choose(builtin_catalog(), layer_op(), problem, facts, {}).recipe.front().family;
  };
  CHECK(family_of_first(1, 3) == persistent);
  CHECK(family_of_first(1, 5) == persistent);
  CHECK(family_of_first(1, 8) != persistent);
  CHECK(family_of_first(2, 3) != persistent);
}

TEST_CASE("layers hold as many weights in registers as do not spill") {
  const auto facts = facts_of_architecture("sm_90a");
  const Family& family = family_of(layer_op(), persistent);
  const auto held = [&](Sizes sizes) {
    return family.default_config(persistent_problem(DType::bf16, std::move(sizes)), facts)
        .get("held");
  };
  CHECK(held({{"d", 2048}, {"h", 8192}}) == 4);
  CHECK(held({{"d", 4096}, {"h", 14336}, {"heads", 32}, {"dim", 128}}) == 2);
}

TEST_CASE(
    "the nearest record of a layer gives way to one launch, or to parts that should be faster") {
  const auto facts = facts_of_architecture("sm_90a");
  const auto problem = [](std::int64_t batch, std::int64_t cache) {
    return persistent_problem(DType::bf16,
                              {{"batch", batch}, {"d", 2048}, {"h", 8192}, {"cache", cache}},
                              {{"angles", "table"}});
  };
  const auto recorded = [&](std::int64_t batch) {
    PresetRecord record = example::record(problem(batch, 2048));
    const StageRecord any_stage = record.stages.front();
    record.stages.clear();
    for (const Variant& variant : default_recipe(layer_op(), record.problem, facts)) {
      StageRecord& stage = record.stages.emplace_back(any_stage);
      stage.stages = family_of(layer_op(), variant.family).stages();
      stage.variant = variant;
    }
    return record;
  };
  const PresetRecord record = recorded(8);
  const auto chosen = [&](const PresetRecord& there, const Problem& asked) {
    const testing::TemporaryFolder folder;
    merge_preset_records(
        folder.path(),
        {facts.slug(), facts.name, facts.kind, facts.arch, facts.multiprocessors, {}}, "layer",
        {there});
    return choose(builtin_catalog(), layer_op(), asked, facts,
                  PresetLibrary::load({folder.path()}));
  };
  PresetRecord of_one = record;
  of_one.problem = problem(1, 2048);
  const Choice exact = chosen(of_one, of_one.problem);
  CAPTURE(exact.reason);
  CHECK(exact.recipe == record.recipe());
  for (const auto& there : {of_one, record}) {
    const Choice near = chosen(there, problem(1, 4096));
    CAPTURE(near.reason);
    REQUIRE(near.recipe.size() == 1);
    CHECK(near.recipe.front().family == persistent);
    CHECK(near.reason.find("one launch of the whole") != std::string::npos);
  }
  of_one.stages = example::record(of_one.problem).stages;
  of_one.stages.resize(1);
  of_one.stages[0].stages = family_of(layer_op(), persistent).stages();
  of_one.stages[0].variant = default_recipe(layer_op(), of_one.problem, facts).front();
  CHECK(chosen(of_one, problem(4, 2048)).recipe.front().family == persistent);
  const Choice far = chosen(of_one, problem(8, 2048));
  CAPTURE(far.reason);
  CHECK(far.recipe == default_recipe(layer_op(), problem(8, 2048), facts));
  CHECK(far.reason.find("should be slower than its parts") != std::string::npos);
  // A stale record gives way where its estimate is slower than the default's; another serves.
  Variant& variant = of_one.stages[0].variant;
  const Variant usual = variant;
  variant.config.set("held", 0);
  of_one.stages[0].source_hash = "0123456789abcdef";
  CHECK(chosen(of_one, of_one.problem).recipe == Recipe{usual});
  of_one.stages[0].source_hash =
      builtin_catalog().sources->hash(family_of(layer_op(), persistent).sources());
  CHECK(chosen(of_one, of_one.problem).recipe == Recipe{variant});
  // The estimates of the parts decide, except for the norms, which have none. Groups of CTAs divide
  // the keys of 6 sequences as evenly as those of 8.
  CHECK(chosen(record, problem(6, 2048)).recipe == record.recipe());
  const Problem asked = problem(199, 2048);
  PresetRecord slow = recorded(200);
  CHECK(chosen(slow, asked).recipe == slow.recipe());
  Variant& down = slow.stages.back().variant;
  const Family& family = family_of(layer_op(), down.family);
  for (const Config& config : family.space(asked, facts).feasible())
    if (family.estimate(asked, facts, config) > family.estimate(asked, facts, down.config))
      down.config = config;
  const Choice many = chosen(slow, asked);
  CAPTURE(many.reason);
  CHECK(many.recipe == default_recipe(layer_op(), asked, facts));
  CHECK(many.reason.find("times as long as the default") != std::string::npos);
}

TEST_CASE("estimates of one launch know what measurement found to be slower") {
  const auto facts = facts_of_architecture("sm_90a");
  const auto slower_by = [&](std::int64_t batch, const char* parameter, std::int64_t value) {
    const Problem problem = persistent_problem(
        DType::bf16, {{"batch", batch}, {"d", 2048}, {"h", 8192}, {"cache", 512}});
    const Family& family = family_of(layer_op(), persistent);
    const Config usual = family.default_config(problem, facts);
    Config other = usual;
    other.set(parameter, value);
    REQUIRE(other != usual);
    return family.estimate(problem, facts, other).value() /
           family.estimate(problem, facts, usual).value();
  };
  CHECK(slower_by(1, "held", 0) > most_misfit(false));
  CHECK(slower_by(4, "held", 0) > most_misfit(false));
  CHECK(slower_by(4, "input_kb", 36) > most_misfit(false));
  CHECK(slower_by(1, "input_kb", 16) == 1);
}

// Each takes a part of the uses, because the compilation of a kernel takes seconds.
TEST_CASE("persistent layers of one token of each sequence against the reference", "[gpu]") {
  verify_uses(uses_of_dense(), 0, 5);
}

TEST_CASE("persistent layers with packed weights and pages against the reference", "[gpu]") {
  verify_uses(uses_of_dense(), 5, 8);
}

TEST_CASE("persistent layers of many sequences over pages against the reference", "[gpu]") {
  verify_uses(uses_of_dense(), 8, 10);
}

TEST_CASE("persistent layers of several tokens of a sequence against the reference", "[gpu]") {
  verify_uses(uses_of_dense(), 10, 13);
}

TEST_CASE("persistent layers of several tokens over pages against the reference", "[gpu]") {
  verify_uses(uses_of_dense(), 13, 16);
}

TEST_CASE("persistent layers with windows and sinks against the reference", "[gpu]") {
  verify_uses(uses_of_dense(), 16, 18);
}

TEST_CASE("persistent layers with windows of several tokens, and parts of heads rotated", "[gpu]") {
  verify_uses(uses_of_dense(), 18, uses_of_dense().size() - 2);
}

TEST_CASE("persistent layers whose activations come in several parts, against the reference",
          "[gpu]") {
  verify_uses(uses_of_dense(), uses_of_dense().size() - 2, uses_of_dense().size());
}

// Few and small, for memcheck and racecheck.
TEST_CASE("persistent layers with weights ahead in L2 against the reference", "[gpu][ahead]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const Use& use : {Use{DType::bf16, {{"batch", 2}, {"cache", 40}}, {}},
                         Use{DType::bf16, {{"s", 5}, {"cache", 40}}, {}}, uses_of_experts()[0],
                         uses_of_4_bits()[1], uses_of_packed_experts()[3]}) {
    const Problem problem = persistent_problem(use.dtype, use.sizes, use.options);
    const Family& family = family_for(problem);
    if (family.refusal(problem, backend->facts())) return;
    Config config = family.default_config(problem, backend->facts());
    config.set("ahead_kb", 32);
    verify_persistent(*backend, use, 2, config);
  }
}

TEST_CASE("persistent layers of a rank's slice against the reference", "[gpu]") {
  verify_uses(uses_of_ranks(), 0, uses_of_ranks().size());
}

TEST_CASE("persistent layers with experts against the reference", "[gpu]") {
  verify_uses(uses_of_experts(), 0, 2);
}

TEST_CASE("persistent layers with experts of several tokens against the reference", "[gpu]") {
  verify_uses(uses_of_experts(), 2, 5);
}

TEST_CASE("persistent layers with experts that have biases, sinks and a window", "[gpu]") {
  verify_uses(uses_of_experts(), 5, 6);
}

TEST_CASE("persistent layers with experts and a shared MLP", "[gpu]") {
  verify_uses(uses_of_experts(), 6, 7);
}

TEST_CASE("persistent layers with experts and a shared MLP that has a gate", "[gpu]") {
  verify_uses(uses_of_experts(), 7, uses_of_experts().size());
}

TEST_CASE("persistent layers with factors of what they add to the residual stream", "[gpu]") {
  verify_uses(uses_of_factors(), 0, uses_of_factors().size());
}

TEST_CASE("persistent layers with norms behind their parts and soft caps", "[gpu]") {
  verify_uses(uses_of_norms_behind(), 0, 2);
}

TEST_CASE("persistent layers with packed weights and norms behind their parts", "[gpu]") {
  verify_uses(uses_of_norms_behind(), 2, uses_of_norms_behind().size());
}

TEST_CASE("persistent layers with weights of 4 bits against the reference", "[gpu]") {
  verify_uses(uses_of_4_bits(), 0, 2);
}

TEST_CASE("persistent layers with weights of 4 bits over pages and of several tokens", "[gpu]") {
  verify_uses(uses_of_4_bits(), 2, uses_of_4_bits().size());
}

TEST_CASE("persistent layers with weights of 8 bits against the reference", "[gpu]") {
  verify_uses(uses_of_8_bits(), 0, uses_of_8_bits().size());
}

TEST_CASE("persistent layers with experts in int4 against the reference", "[gpu]") {
  verify_uses(uses_of_packed_experts(), 0, 3);
}

TEST_CASE("persistent layers with experts in mxfp4 behind dense attention", "[gpu]") {
  verify_uses(uses_of_packed_experts(), 3, 6);
}

TEST_CASE("persistent layers with experts in nvfp4, and a shared MLP", "[gpu]") {
  verify_uses(uses_of_packed_experts(), 6, 8);
}

TEST_CASE("persistent layers with experts in 8 bits, and a gated shared MLP", "[gpu]") {
  verify_uses(uses_of_packed_experts(), 8, 11);
}

TEST_CASE("persistent layers with experts whose rows have several stages", "[gpu]") {
  verify_uses(uses_of_packed_experts(), 11, first_of_shared_tiles);
}

TEST_CASE("persistent layers whose blocks share tiles of down against the reference", "[gpu]") {
  verify_uses(uses_of_packed_experts(), first_of_shared_tiles, uses_of_packed_experts().size());
}

TEST_CASE("blocks that share tiles of down take every part once, and own every row once") {
  const auto all = uses_of_packed_experts();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Problem problem = persistent_problem(all[i].dtype, all[i].sizes, all[i].options);
    const persistent_config form =
        layer::form_of(problem, layer::Layer(problem), facts_of_architecture("sm_90a"));
    CAPTURE(problem.text());
    CHECK(form.shares_tiles() == (i >= first_of_shared_tiles));
    CHECK(form.first_part(0) == 0);
    CHECK(form.first_part(form.blocks) == form.down_parts());
    CHECK(form.first_owned_row(form.blocks) == form.d);
    CHECK(form.first_owned_hidden(form.blocks) == form.all_hidden());
    for (int block = 0; block < form.blocks; ++block) {
      const int pair = form.first_gate_up(block), next = form.first_gate_up(block + 1);
      CHECK(next - pair <=
            form.up(form.gate_up_tiles(), form.blocks) + (form.shares_pairs() ? 0 : 1));
      CHECK((!form.shares_pairs() || next > pair));
      CHECK(next - pair <= form.most_blocks());
      const int first = form.first_part(block), end = form.first_part(block + 1);
      const int rows = form.first_owned_row(block + 1) - form.first_owned_row(block);
      CHECK(end - first <=
            form.up(form.down_parts(), form.blocks) + (form.shares_tiles() ? 0 : form.slots()));
      CHECK(rows <= form.most_residual_rows());
      // A block completes the tile that the one before it owns.
      CHECK((!form.shares_tiles() || first % form.slots() == 0 ||
             end >= form.up(first, form.slots()) * form.slots()));
      const int tiles = rows / packed_rows + (first % form.slots() > 0 ? 1 : 0);
      CHECK(tiles <= form.most_blocks());
    }
  }
}

TEST_CASE("more persistent layers than a launch has parameters for", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const Family& family = family_of(layer_op(), persistent);
  const Use use{DType::bf16, {{"d", 160}, {"h", 160}}, {}};
  const Problem problem = persistent_problem(use.dtype, use.sizes, use.options);
  if (const auto reason = family.refusal(problem, backend->facts())) return;
  verify_persistent(*backend, use, 50, family.default_config(problem, backend->facts()));
}

TEST_CASE("a persistent layer of a large model", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const Family& family = family_of(layer_op(), persistent);
  const Use use{DType::bf16,
                {{"d", 4096},
                 {"h", 14336},
                 {"heads", 32},
                 {"kv-heads", 8},
                 {"dim", 128},
                 {"batch", 2},
                 {"cache", 300}},
                {{"lengths", "ragged"}}};
  const Problem problem = persistent_problem(use.dtype, use.sizes, use.options);
  if (const auto reason = family.refusal(problem, backend->facts())) return;
  verify_persistent(*backend, use, 1, family.default_config(problem, backend->facts()));
}
