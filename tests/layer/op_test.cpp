// The op layer: its buffers, its refusals, its models, and that its parts' records serve.
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <variant>

#include "core/distribution.hpp"
#include "core/error.hpp"
#include "device/facts.hpp"
#include "layer/problems.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Sizes small(Sizes more = {}) {
  more.insert({{"batch", 2},
               {"d", 32},
               {"h", 64},
               {"heads", 4},
               {"kv-heads", 2},
               {"dim", 16},
               {"cache", 24}});
  return more;
}

/// The buffers: all but the intermediates.
Names names_of(const Sizes& sizes, const Options& options = {}) {
  Names names;
  for (const auto& tensor :
       layer_op().tensors(layer_problem(DeviceKind::cuda, DType::bf16, sizes, options)))
    if (tensor.role != Role::intermediate) names.push_back(tensor.name);
  return names;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The names with spaces between them.
std::string text_of(const Names& names) {
  return fmt::format("{}", fmt::join(names, " "));
}

}  // namespace

TEST_CASE("layer's buffers are in the order that the API promises") {
  const Names shared{"x", "positions", "slots", "lengths"};
  const Names own{"attn_norm", "w_q",      "w_k",    "w_v",  "k_cache", "v_cache",
                  "w_o",       "ffn_norm", "w_gate", "w_up", "w_down"};
  Names one = shared;
  one.insert(one.end(), own.begin(), own.end());
  one.emplace_back("y");
  CHECK(names_of(small()) == one);

  Names three = shared;
  for (const char* layer : {"layers.0.", "layers.1.", "layers.2."})
    for (const std::string& name : own) three.push_back(layer + name);
  three.emplace_back("y");
  CHECK(names_of(small({{"layers", 3}})) == three);

  CHECK(
      names_of(small(), {{"norm", "layer"},
                         {"ffn", "plain"},
                         {"qkv-bias", "yes"},
                         {"out-bias", "yes"},
                         {"ffn-bias", "yes"},
                         {"rotation", "none"}}) ==
      Names{"x",   "slots",    "lengths",       "attn_norm", "attn_norm_bias", "w_q",     "w_k",
            "w_v", "b_q",      "b_k",           "b_v",       "k_cache",        "v_cache", "w_o",
            "b_o", "ffn_norm", "ffn_norm_bias", "w_up",      "w_down",         "b_up",    "b_down",
            "y"});
  CHECK(names_of(small(), {{"post-norms", "yes"}, {"qk-norm", "yes"}, {"convention", "gemma"}}) ==
        Names{"x",       "positions", "slots",  "lengths",        "attn_norm",
              "w_q",     "w_k",       "w_v",    "q_norm",         "k_norm",
              "k_cache", "v_cache",   "w_o",    "attn_post_norm", "ffn_norm",
              "w_gate",  "w_up",      "w_down", "ffn_post_norm",  "y"});
  CHECK(names_of(small({{"experts", 8}, {"top-k", 2}}), {{"ffn", "moe"}, {"ffn-bias", "yes"}}) ==
        Names{"x",    "positions", "slots",   "lengths", "attn_norm", "w_q",      "w_k",
              "w_v",  "k_cache",   "v_cache", "w_o",     "ffn_norm",  "w_router", "w_gate",
              "w_up", "w_down",    "b_gate",  "b_up",    "b_down",    "y"});
  CHECK(names_of(small({{"experts", 8}, {"top-k", 2}}),
                 {{"ffn", "moe"}, {"ffn-bias", "yes"}, {"gate-up", "halves"}}) ==
        Names{"x", "positions", "slots", "lengths", "attn_norm", "w_q", "w_k", "w_v", "k_cache",
              "v_cache", "w_o", "ffn_norm", "w_router", "w_gate_up", "w_down", "b_gate_up",
              "b_down", "y"});
}

TEST_CASE("layer's buffers of rarer forms are in the order that the API promises") {
  CHECK(names_of(small(), {{"post-norms", "only"}}) ==
        Names{"x", "positions", "slots", "lengths", "w_q", "w_k", "w_v", "k_cache", "v_cache",
              "w_o", "attn_post_norm", "w_gate", "w_up", "w_down", "ffn_post_norm", "y"});
  CHECK(names_of(small(), {{"sinks", "yes"}, {"output-gate", "heads"}}) ==
        Names{"x", "positions", "slots", "lengths", "attn_norm", "w_q", "w_k", "w_v", "k_cache",
              "v_cache", "sinks", "w_g", "w_o", "ffn_norm", "w_gate", "w_up", "w_down", "y"});
  CHECK(names_of(small(), {{"v-norm", "yes"}, {"layer-scalar", "yes"}}) ==
        Names{"x", "positions", "slots", "lengths", "attn_norm", "w_q", "w_k", "w_v", "k_cache",
              "v_cache", "w_o", "ffn_norm", "w_gate", "w_up", "w_down", "layer_scalar", "y"});
  CHECK(names_of(small({{"input-h", 8}}), {{"keys", "shared"}, {"query-scale", "rows"}}) ==
        Names{"x", "positions", "lengths", "attn_norm", "w_q", "k_cache", "v_cache", "q_factors",
              "w_o", "ffn_norm", "w_gate", "w_up", "w_down", "w_input_gate", "layer_input",
              "w_input_out", "input_norm", "y"});
  CHECK(text_of(names_of(small({{"experts", 8}, {"top-k", 2}, {"shared-h", 24}}),
                         {{"ffn", "moe"},
                          {"post-norms", "yes"},
                          {"expert-norms", "yes"},
                          {"expert-scale", "yes"}})) ==
        "x positions slots lengths attn_norm w_q w_k w_v k_cache v_cache w_o "
        "attn_post_norm ffn_norm w_router expert_scale router_norm experts_norm w_gate "
        "w_up w_down w_shared_gate w_shared_up w_shared_down shared_post_norm "
        "experts_post_norm ffn_post_norm y");
  const Names parallel = names_of(small(), {{"block", "parallel-norms"}});
  CHECK(parallel == names_of(small()));
  CHECK(text_of(names_of(small({{"experts", 8}, {"top-k", 2}, {"shared-h", 24}}),
                         {{"ffn", "moe"},
                          {"sinks", "yes"},
                          {"router-bias", "yes"},
                          {"choice-bias", "yes"},
                          {"shared-gate", "yes"}})) ==
        "x positions slots lengths attn_norm w_q w_k w_v k_cache v_cache sinks w_o "
        "ffn_norm w_router b_router choice_bias w_gate w_up w_down w_shared_router "
        "w_shared_gate w_shared_up w_shared_down y");
}

TEST_CASE("a rank's slice has the sums of its group in the place of residuals and norms") {
  const auto stages = [](const Options& options, Sizes more = {}) {
    more["ranks"] = 2;
    Names names;
    for (const auto& stage :
         layer_op().stages(layer_problem(DeviceKind::cuda, DType::bf16, small(more), options)))
      names.push_back(stage.name);
    return names;
  };
  const Names attention{"attn_norm.forward", "qkv.product", "attention.forward", "out.product"};
  const auto behind = [&](Names names) {
    names.insert(names.begin(), attention.begin(), attention.end());
    return names;
  };
  CHECK(stages({}) ==
        behind({"attn_reduce.forward", "ffn.gate_up", "ffn.down", "ffn_reduce.forward"}));
  // A network beside attention adds to the rank's summand: there is one sum.
  CHECK(stages({{"block", "parallel"}}) ==
        behind({"ffn.gate_up", "ffn.down", "ffn_reduce.forward"}));
  CHECK(stages({{"post-norms", "yes"}}) ==
        behind({"attn_reduce.forward", "attn_post_norm.forward", "ffn_norm.forward", "ffn.gate_up",
                "ffn.down", "ffn_reduce.forward", "ffn_post_norm.forward"}));
  CHECK(names_of(small({{"ranks", 2}})) == names_of(small()));
  Names peers = names_of(small());
  peers.insert(peers.begin() + 4, "group");
  CHECK(names_of(small({{"ranks", 2}}), {{"link", "peers"}}) == peers);
  CHECK(contains(layer_complaint(small(), {{"link", "peers"}}), "link=peers without ranks"));
  CHECK(contains(layer_complaint(small({{"ranks", 9}})), "ranks"));
  const Options mixture{{"ffn", "moe"}};
  const Sizes experts{{"experts", 6}, {"top-k", 2}, {"own-experts", 3}};
  const auto with_experts = [&](Sizes more) {
    more.insert(experts.begin(), experts.end());
    return small(more);
  };
  CHECK(contains(layer_complaint(with_experts({}), mixture), "own-experts=3 without ranks"));
  CHECK(contains(layer_complaint(with_experts({{"ranks", 2}, {"shared", 1}}), mixture),
                 "shared with own-experts"));
  CHECK(contains(layer_complaint(small({{"ranks", 2}, {"own-experts", 3}})),
                 "own-experts=3 is of ffn=moe"));
  CHECK(layer_complaint(with_experts({{"ranks", 2}}), mixture) == "");
  CHECK(contains(layer_complaint(small({{"ranks", 2}}), {{"qk-norm", "rows"}}),
                 "qk-norm=rows with ranks=2"));
}

TEST_CASE("layers over pages share a table, whose pages hold the new tokens of one sequence") {
  const Problem problem = layer_problem(
      DeviceKind::cuda, DType::bf16,
      small({{"batch", 5}, {"s", 3}, {"cache", 90}, {"layers", 2}, {"page", 16}, {"pages", 14}}),
      {{"lengths", "ragged"}});
  const auto tensors = layer_op().tensors(problem);
  const auto spec_of = [&](const char* name) { return tensors[tensor_index(tensors, name)]; };
  const auto values_of = [&](const char* name) {
    const TensorSpec spec = spec_of(name);
    std::vector<double> values(static_cast<std::size_t>(spec.elements()));
    REQUIRE(spec.draw);
    spec.draw(7, values);
    return values;
  };
  CHECK(spec_of("pages").shape == std::vector<std::int64_t>{5, 6});
  CHECK(spec_of("layers.1.k_cache").elements() == 14 * 16 * 2 * 16);
  const auto pages = values_of("pages"), slots = values_of("slots"), lengths = values_of("lengths");
  std::map<double, std::size_t> owners;
  for (std::size_t row = 0; row < slots.size(); ++row) {
    const std::size_t sequence = row / 3;
    const auto key = static_cast<std::size_t>(lengths[sequence]) - 3 + row % 3;
    const double page = pages[sequence * 6 + key / 16];
    CHECK(slots[row] == page * 16 + static_cast<double>(key % 16));
    owners.emplace(page, sequence);
    CHECK(owners.at(page) == sequence);
  }
  // No other sequence reads a page that is written.
  for (std::size_t i = 0; i < pages.size(); ++i)
    if (const auto owner = owners.find(pages[i]); owner != owners.end())
      CHECK(owner->second == i / 6);
}

TEST_CASE("layers of one plan are the one layer, each with its own tensors") {
  const Problem problem =
      layer_problem(DeviceKind::cuda, DType::bf16, small({{"layers", 4}, {"s", 3}}));
  const auto repetition = layer_op().repetition(problem);
  REQUIRE(repetition);
  CHECK_FALSE(repetition->one.sizes.contains("layers"));
  const auto all = layer_op().tensors(problem), one = layer_op().tensors(repetition->one);
  REQUIRE(repetition->places.size() == 4);
  std::set<std::size_t> weights;
  for (std::size_t layer = 0; layer < 4; ++layer) {
    const auto& places = repetition->places[layer];
    REQUIRE(places.size() == one.size());
    for (std::size_t i = 0; i < one.size(); ++i) CHECK(all[places[i]].shape == one[i].shape);
    weights.insert(places[tensor_index(one, "w_q")]);
    // A layer reads the previous layer's result.
    if (layer > 0)
      CHECK(places[tensor_index(one, "x")] ==
            repetition->places[layer - 1][tensor_index(one, "y")]);
  }
  CHECK(weights.size() == 4);
  CHECK(layer_op().stages(problem).size() == 4 * layer_op().stages(repetition->one).size());
  CHECK(unrepeated(layer_op(), problem) == repetition->one);
}

TEST_CASE("layer refuses fields that do not go together") {
  CHECK(layer_complaint(small()) == "");
  CHECK(contains(layer_complaint(small({{"s", 25}})), "s=25 exceeds cache=24"));
  CHECK(contains(layer_complaint(small({{"rotary", 7}})), "rotary=7 is odd"));
  CHECK(contains(layer_complaint(small({{"rotary", 64}})), "rotary=64 exceeds dim=16"));
  CHECK(contains(layer_complaint(small(), {{"norm", "layer"}, {"convention", "gemma"}}),
                 "is of norm=rms"));
  CHECK(contains(layer_complaint(small(), {{"block", "parallel"}, {"post-norms", "yes"}}),
                 "both add to one residual"));
  CHECK(contains(layer_complaint(small(), {{"block", "parallel-norms"}, {"post-norms", "only"}}),
                 "both add to one residual"));
  CHECK(contains(layer_complaint(small(), {{"norm", "layer"}, {"post-norms", "only"}}),
                 "post-norms=only is of norm=rms"));
  CHECK(contains(layer_complaint(small(), {{"residual-scale", "yes"}, {"post-norms", "yes"}}),
                 "residual-scale=yes with post-norms=yes"));
  CHECK(contains(layer_complaint(small(), {{"act", "swiglu-oai"}}), "swiglu-oai"));
  CHECK(contains(layer_complaint(small({{"groups", 4}})), "groups=4 is of ffn=moe"));
  CHECK(contains(layer_complaint(small(), {{"choice-bias", "yes"}}),
                 "choice-bias=yes is of ffn=moe"));
  CHECK(contains(layer_complaint(small({{"experts", 8}, {"top-k", 2}}),
                                 {{"ffn", "moe"}, {"shared-gate", "yes"}}),
                 "shared-gate=yes without shared-h"));
  CHECK(contains(
      layer_complaint(small({{"experts", 8}, {"top-k", 2}, {"groups", 3}}), {{"ffn", "moe"}}),
      "groups=3 does not divide experts=8"));
  CHECK(contains(layer_complaint(small(), {{"ffn", "moe"}}), "ffn=moe without experts"));
  CHECK(contains(layer_complaint(small({{"experts", 8}}), {{"ffn", "moe"}}),
                 "ffn=moe without top-k"));
  CHECK(contains(layer_complaint(small({{"experts", 8}, {"top-k", 9}}), {{"ffn", "moe"}}),
                 "top-k=9 exceeds experts=8"));
  CHECK(contains(layer_complaint(small({{"experts", 8}})), "experts=8 is of ffn=moe"));
  CHECK(contains(layer_complaint(small(), {{"renormalise", "yes"}}),
                 "renormalise=yes is of ffn=moe"));
  CHECK(
      contains(layer_complaint(small(), {{"gate-up", "halves"}}), "gate-up=halves is of ffn=moe"));
  Sizes heads = small();
  heads["kv-heads"] = 3;
  CHECK(contains(layer_complaint(heads), "kv-heads=3 do not divide heads=4"));
  CHECK(contains(layer_complaint(small({{"page", 24}})), "page=24 is not 16, 32, 64, 128 or 256"));
  CHECK(contains(layer_complaint(small({{"pages", 24}})), "pages without page"));
  CHECK(contains(layer_complaint(small({{"page", 16}, {"pages", 1}})),
                 "pages=1: new tokens alone are in up to 2 pages"));
}

TEST_CASE("every model that layer knows is a problem of it") {
  for (const KnownModel& model : layer_op().known_models()) {
    CAPTURE(model.name);
    Sizes sizes = model.sizes;
    sizes.insert({{"batch", 1}, {"cache", 128}});
    // Layers with states have no cache.
    const auto mixer = model.options.find("mixer");
    if (mixer != model.options.end() && mixer->second != "mla") sizes.erase("cache");
    CHECK(layer_complaint(sizes, model.options) == "");
  }
}

namespace {

/// Kernels of an untuned decode step of one layer of a known model on an H100: one cooperative
/// launch, or several that must all be launched programmatically.
std::size_t kernels_of_step(const std::string& model, std::int64_t batch) {
  const auto models = layer_op().known_models();
  const auto known = std::find_if(models.begin(), models.end(),
                                  [&](const KnownModel& each) { return each.name == model; });
  REQUIRE(known != models.end());
  Sizes sizes = known->sizes;
  sizes.insert({{"batch", batch}, {"cache", 2048}});
  const auto facts = facts_of_architecture("sm_90a");
  const Problem problem = layer_problem(DeviceKind::cuda, DType::bf16, sizes, known->options);
  std::size_t kernels = 0;
  const Recipe recipe = default_recipe(layer_op(), problem, facts);
  for (const Variant& variant : recipe) {
    CAPTURE(problem.text(), variant.id());
    const Program program =
        family_of(layer_op(), variant.family).program(problem, facts, variant.config);
    for (const Step& step : program.steps) {
      const auto& launch = std::get<KernelLaunch>(step);
      CHECK((recipe.size() == 1 ? launch.cooperative : launch.programmatic));
      ++kernels;
    }
  }
  return kernels;
}

}  // namespace

TEST_CASE("an untuned decode step is few kernels a layer, each behind the one before") {
  for (const char* model : {"llama-3.2-1b", "llama-3.1-8b"})
    for (const auto& [batch, kernels] : {std::pair(1, 1), {2, 1}, {3, 7}, {16, 7}})
      CHECK(kernels_of_step(model, batch) == static_cast<std::size_t>(kernels));
  CHECK(kernels_of_step("qwen3-30b-a3b", 1) == 1);
  CHECK(kernels_of_step("qwen3-30b-a3b", 16) == 11);
  CHECK(kernels_of_step("olmo-2-1b", 16) == 8);
  CHECK(kernels_of_step("granite-3.3-8b", 1) == 1);
  CHECK(kernels_of_step("granite-3.3-8b", 16) == 7);
  CHECK(kernels_of_step("glm-4.5-air", 1) == 1);
  CHECK(kernels_of_step("glm-4.5-air", 2) == 13);
}

TEST_CASE("test data of a layer with experts route its tokens as asked, by a clear margin") {
  for (const char* routing : {"uniform", "zipf:1"}) {
    const Problem problem =
        layer_problem(DeviceKind::cuda, DType::bf16,
                      small({{"batch", 40}, {"d", 1024}, {"experts", 64}, {"top-k", 6}}),
                      {{"ffn", "moe"}, {"routing", routing}});
    const auto tensors = layer_op().tensors(problem);
    const auto values_of = [&](const char* name) {
      const TensorSpec& spec = tensors[tensor_index(tensors, name)];
      std::vector<double> values(static_cast<std::size_t>(spec.elements()));
      REQUIRE(spec.draw);
      spec.draw(7, values);
      return values;
    };
    const auto x = values_of("x"), w = values_of("w_router");
    const auto ids = draw_routing(*parse_routing(routing), 40, 64, 6, 7);
    for (std::size_t token = 0; token < 40; ++token) {
      double least_chosen = 1e9, most_other = -1e9;
      const auto own = ids.begin() + static_cast<std::ptrdiff_t>(token * 6);
      for (std::int32_t expert = 0; expert < 64; ++expert) {
        double logit = 0;
        for (std::size_t i = 0; i < 1024; ++i)
          logit += x[token * 1024 + i] * w[static_cast<std::size_t>(expert) * 1024 + i];
        if (std::find(own, own + 6, expert) != own + 6)
          least_chosen = std::min(least_chosen, logit);
        else
          most_other = std::max(most_other, logit);
      }
      CHECK(least_chosen > most_other + 1);
    }
  }
}

TEST_CASE("layer counts what its parts count") {
  const Problem problem = layer_problem(DeviceKind::cuda, DType::bf16, small());
  double flops = 0;
  for (const OpPart& part : layer_op().parts(problem))
    for (const StageSpec& stage : part.op->stages(part.problem)) flops += stage.flops;
  CHECK(cost_of(layer_op(), problem).flops == flops);
  // x and y, both caches, positions and slots of the tokens, lengths of the sequences, weights.
  const double weights = 32 * (64 + 2 * 32) + 64 * 32 + 3 * 32 * 64 + 2 * 32;
  CHECK(cost_of(layer_op(), problem).bytes ==
        2 * (weights + 2 * 2 * 32 + 2 * 2 * 24 * 32) + 4 * (2 + 2 + 2));
}
