// Layers whose mixer is no attention, against the float64 reference.
#include <random>

#include "device/facts.hpp"
#include "layer/problems.hpp"
#include "registry/part_family.hpp"
#include "runtime/plan.hpp"
#include "support/catch.hpp"
#include "support/op_reference.hpp"
#include "support/verify_plan.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Sizes with_pages(Sizes sizes) {
  sizes["page"] = 16;
  sizes["cache"] = 40;
  return sizes;
}

/// States as vLLM keeps them, of convolutions of width 4.
Sizes in_pages(Sizes sizes, std::int64_t state_block, std::int64_t conv_block) {
  sizes.insert({{"states", 7},
                {"state-block", state_block},
                {"conv-block", conv_block},
                {"conv-entries", 3}});
  return sizes;
}

std::vector<SmallModel> models_with_states() {
  const Sizes conv{{"d", 72}, {"h", 136}, {"heads", 3}, {"dim", 20}, {"width", 3}};
  Sizes experts = conv;
  experts.insert({{"experts", 6}, {"top-k", 2}});
  Sizes wide = conv;
  wide["width"] = 7;
  const Sizes delta{{"d", 72},   {"h", 104},    {"heads", 2}, {"v-heads", 4},
                    {"dim", 16}, {"v-dim", 24}, {"width", 4}};
  Sizes as_many = delta;
  as_many["v-heads"] = 2;
  Sizes kimi = delta;
  kimi.erase("v-heads");
  Sizes low_rank = kimi;
  low_rank["gate-rank"] = 20;
  // Groups whose heads, and heads whose features, are no multiples of what kernels like.
  const Sizes ssd{{"d", 72},         {"h", 104},          {"heads", 6}, {"dim", 12},
                  {"state-dim", 24}, {"state-groups", 3}, {"width", 4}};
  Sizes mixture = ssd;
  mixture["state-groups"] = 1;
  mixture["dim"] = 11;
  mixture["state-dim"] = 20;
  mixture.insert({{"experts", 6}, {"top-k", 2}, {"shared-h", 40}});
  Sizes both = ssd;
  both.insert({{"ssm-heads", 6}, {"ssm-dim", 12}, {"kv-heads", 2}, {"cache", 20}});
  both["heads"] = 4;
  both["dim"] = 16;
  Sizes conv_in_pages = conv;
  conv_in_pages.insert({{"states", 6}, {"conv-block", 60 * 5 + 8}, {"conv-entries", 5}});
  Sizes alone = ssd;
  alone.erase("h");
  const Sizes network{{"d", 72}, {"h", 104}};
  Sizes experts_alone = network;
  experts_alone.insert({{"experts", 6}, {"top-k", 2}, {"shared-h", 40}});
  return {{"qwen3.5", delta, {{"mixer", "gated-delta-rule"}, {"convention", "gemma"}}},
          {"olmo hybrid",
           delta,
           {{"mixer", "gated-delta-rule"}, {"beta-scale", "2"}, {"mixer-eps", "1e-5"}}},
          {"lfm2", conv, {{"mixer", "conv"}, {"eps", "1e-5"}}},
          {"lfm2moe",
           experts,
           {{"mixer", "conv"},
            {"ffn", "moe"},
            {"score", "sigmoid"},
            {"choice-bias", "yes"},
            {"renormalise", "yes"},
            {"sum-eps", "1e-06"},
            {"gate-up", "halves"}}},
          {"lfm2 with biases",
           wide,
           {{"mixer", "conv"}, {"conv-bias", "yes"}, {"out-bias", "yes"}, {"post-norms", "yes"}}},
          {"bamba", ssd, {{"mixer", "ssd"}, {"conv-bias", "yes"}, {"mixer-eps", "1e-5"}}},
          {"granite hybrid",
           mixture,
           {{"mixer", "ssd"},
            {"ffn", "moe"},
            {"order", "after"},
            {"gate-up", "halves"},
            {"residual-scale", "yes"},
            {"route-scale", "0.22"}}},
          {"qwen3.5, packed",
           delta,
           {{"mixer", "gated-delta-rule"}, {"qkv-weights", "packed"}, {"convention", "gemma"}}},
          {"kimi, packed", kimi, {{"mixer", "kda"}, {"qkv-weights", "packed"}}},
          {"kimi linear", low_rank, {{"mixer", "kda"}}},
          {"ling", kimi, {{"mixer", "kda"}, {"gate-bound", "-5"}, {"mixer-eps", "1e-5"}}},
          {"mamba2", alone, {{"mixer", "ssd"}, {"ffn", "none"}, {"conv-bias", "yes"}}},
          {"steps with limits",
           alone,
           {{"mixer", "ssd"}, {"ffn", "none"}, {"dt-min", "0.25"}, {"dt-max", "1"}}},
          {"mamba2 with a norm behind",
           alone,
           {{"mixer", "ssd"}, {"ffn", "none"}, {"post-norms", "yes"}, {"layer-scalar", "yes"}}},
          {"nemotron-h's MLP", network, {{"mixer", "none"}, {"ffn", "plain"}, {"act", "relu2"}}},
          {"an MLP alone",
           network,
           {{"mixer", "none"}, {"residual-scale", "yes"}, {"layer-scalar", "yes"}}},
          {"nemotron-h's experts",
           experts_alone,
           {{"mixer", "none"},
            {"ffn", "moe"},
            {"act", "relu2"},
            {"score", "sigmoid"},
            {"choice-bias", "yes"},
            {"renormalise", "yes"},
            {"route-scale", "2.5"}}},
          {"qwen3-next",
           delta,
           {{"mixer", "gated-delta-rule"}, {"qkv-weights", "grouped"}, {"convention", "gemma"}}},
          {"qwen3-next with a value head for each head of k",
           as_many,
           {{"mixer", "gated-delta-rule"}, {"qkv-weights", "grouped"}}},
          {"falcon-h1",
           both,
           {{"mixer", "attention-ssd"},
            {"conv-bias", "yes"},
            {"mixer-norm", "none"},
            {"in-scale", "yes"},
            {"residual-scale", "each"},
            {"gate-scale", "yes"},
            {"rope-scale", "0.4"},
            {"scale", "0.6"},
            {"lengths", "ragged"}}},
          {"falcon-h1 with a norm, and pages",
           with_pages(both),
           {{"mixer", "attention-ssd"}, {"dt-min", "0.25"}, {"out-bias", "yes"}}},
          {"scales of a layer without ssd",
           conv,
           {{"mixer", "conv"}, {"residual-scale", "each"}, {"gate-scale", "yes"}}},
          {"qwen3-next with states in pages",
           in_pages(delta, 4 * 24 * 16 + 40, 160 * 3 + 24),
           {{"mixer", "gated-delta-rule"},
            {"qkv-weights", "grouped"},
            {"conv-indices", "yes"},
            {"conv-order", "entries"},
            {"state-layout", "vk"},
            {"null-index", "0"}}},
          {"qwen3.5 with states in pages",
           in_pages(delta, 4 * 24 * 16 + 8, 160 * 3),
           {{"mixer", "gated-delta-rule"},
            {"qkv-weights", "packed"},
            {"conv-indices", "yes"},
            {"state-layout", "vk"},
            {"state-dtype", "bf16"}}},
          {"olmo hybrid with states in pages",
           in_pages(delta, 4 * 24 * 16, 160 * 3 + 3),
           {{"mixer", "gated-delta-rule"}, {"conv-indices", "yes"}, {"null-index", "0"}}},
          {"bamba with states in pages",
           in_pages(ssd, 6 * 12 * 24 + 16, (72 + 2 * 72) * 3 + 5),
           {{"mixer", "ssd"},
            {"conv-bias", "yes"},
            {"conv-indices", "yes"},
            {"conv-order", "entries"},
            {"state-dtype", "bf16"},
            {"null-index", "0"}}},
          {"lfm2 with states in pages",
           conv_in_pages,
           {{"mixer", "conv"}, {"conv-indices", "yes"}, {"conv-order", "entries"}}}};
}

Problem with_states(const SmallModel& model, DeviceKind kind, DType dtype, const Sizes& more) {
  Sizes sizes = model.sizes;
  for (const auto& [name, value] : more) sizes[name] = value;
  return layer_problem(kind, dtype, std::move(sizes), model.options);
}

/// Decoding, and prompts that are shorter than a convolution is wide and longer.
void verify_states(Backend& backend, DType dtype, int more) {
  const DeviceKind kind = backend.facts().kind;
  std::mt19937_64 random(1);
  for (const SmallModel& model : models_with_states()) DYNAMIC_SECTION(model.name) {
      for (const Sizes& tokens : {Sizes{{"batch", 1}},
                                  {{"batch", 5}},
                                  {{"batch", 3}, {"s", 2}},
                                  {{"batch", 2}, {"s", 13}}}) {
        const Problem problem = with_states(model, kind, dtype, tokens);
        CHECK(verify_variants(backend, layer_op(), problem, random, more) > 0);
        verify_plan(backend, layer_op(), problem, 1);
        Sizes several = tokens;
        several["layers"] = 3;
        verify_plan(backend, layer_op(), with_states(model, kind, dtype, several), 2);
      }
      const std::string& mixer = model.options.at("mixer");
      if (mixer.find("ssd") == std::string::npos && mixer != "none" &&
          !model.options.contains("gate-scale"))
        verify_plan(backend, layer_op(),
                    with_states(model, kind, dtype, {{"batch", 2}, {"s", 3}, {"ranks", 2}}), 3);
    }
}

}  // namespace

TEST_CASE("layers with states have these in the place of caches, and no positions") {
  const auto names = [](const SmallModel& model, const Sizes& more) {
    Names all;
    for (const auto& tensor :
         layer_op().tensors(with_states(model, DeviceKind::cuda, DType::bf16, more)))
      if (tensor.role != Role::intermediate) all.push_back(tensor.name);
    return all;
  };
  const auto models = models_with_states();
  CHECK(names(models[2], {{"batch", 2}}) == Names{"x", "attn_norm", "w_in", "w_conv", "conv_state",
                                                  "w_o", "ffn_norm", "w_gate", "w_up", "w_down",
                                                  "y"});
  CHECK(names(models[4], {{"batch", 2}}) ==
        Names{"x", "attn_norm", "w_in", "b_in", "w_conv", "b_conv", "conv_state", "w_o", "b_o",
              "attn_post_norm", "ffn_norm", "w_gate", "w_up", "w_down", "ffn_post_norm", "y"});
  const auto tensors = layer_op().tensors(
      with_states(models[2], DeviceKind::cuda, DType::bf16, {{"batch", 2}, {"layers", 3}}));
  CHECK(
      names(models[0], {{"batch", 2}}) ==
      Names{"x",      "state_indices", "attn_norm",  "w_q",          "w_k",          "w_v",
            "w_z",    "w_b",           "w_a",        "w_conv_q",     "w_conv_k",     "w_conv_v",
            "A_log",  "dt_bias",       "mixer_norm", "conv_q_state", "conv_k_state", "conv_v_state",
            "states", "w_o",           "ffn_norm",   "w_gate",       "w_up",         "w_down",
            "y"});
  CHECK(names(models[5], {{"batch", 2}}) == Names{"x", "state_indices", "attn_norm", "w_in",
                                                  "w_conv", "b_conv", "A_log", "dt_bias", "D",
                                                  "mixer_norm", "conv_state", "states", "w_o",
                                                  "ffn_norm", "w_gate", "w_up", "w_down", "y"});
  CHECK(names(models[9], {{"batch", 2}}) == Names{"x",
                                                  "state_indices",
                                                  "attn_norm",
                                                  "w_q",
                                                  "w_k",
                                                  "w_v",
                                                  "w_z_low",
                                                  "w_z",
                                                  "w_b",
                                                  "w_a_low",
                                                  "w_a",
                                                  "w_conv_q",
                                                  "w_conv_k",
                                                  "w_conv_v",
                                                  "A_log",
                                                  "dt_bias",
                                                  "mixer_norm",
                                                  "conv_q_state",
                                                  "conv_k_state",
                                                  "conv_v_state",
                                                  "states",
                                                  "w_o",
                                                  "ffn_norm",
                                                  "w_gate",
                                                  "w_up",
                                                  "w_down",
                                                  "y"});
  CHECK(names(models[7], {{"batch", 2}}) == Names{"x", "state_indices", "attn_norm", "w_qkv", "w_z",
                                                  "w_b", "w_a", "w_conv", "A_log", "dt_bias",
                                                  "mixer_norm", "conv_state", "states", "w_o",
                                                  "ffn_norm", "w_gate", "w_up", "w_down", "y"});
  CHECK(names(models[17], {{"batch", 2}}) == Names{"x", "state_indices", "attn_norm", "w_qkvz",
                                                   "w_ba", "w_conv", "A_log", "dt_bias",
                                                   "mixer_norm", "conv_state", "states", "w_o",
                                                   "ffn_norm", "w_gate", "w_up", "w_down", "y"});
  const TensorSpec& state = tensors[tensor_index(tensors, "layers.2.conv_state")];
  CHECK(state.shape == std::vector<std::int64_t>{2, 60, 3});
  CHECK(state.role == Role::updated);
}

TEST_CASE("a mixer refuses the fields of others, and asks for its own") {
  const Sizes conv{{"batch", 2}, {"d", 32}, {"h", 64}, {"heads", 4}, {"dim", 8}, {"width", 3}};
  const auto with = [&](const char* name, std::int64_t size) {
    Sizes sizes = conv;
    sizes[name] = size;
    return sizes;
  };
  const Options options{{"mixer", "conv"}};
  CHECK(layer_complaint(conv, options) == "");
  CHECK(mentions(layer_complaint(with("cache", 24), options), "cache=24 is of mixer=attention"));
  CHECK(
      mentions(layer_complaint(with("kv-heads", 2), options), "kv-heads=2 is of mixer=attention"));
  CHECK(mentions(layer_complaint(with("window", 8), options), "window=8 is of mixer=attention"));
  CHECK(mentions(layer_complaint(conv, {{"mixer", "conv"}, {"sinks", "yes"}}),
                 "sinks=yes is of mixer=attention"));
  CHECK(mentions(layer_complaint(with("width", 1), options), "width=1"));
  Sizes narrow = conv;
  narrow.erase("width");
  CHECK(mentions(layer_complaint(narrow, options), "mixer=conv without width"));
  CHECK(mentions(layer_complaint(with("cache", 24)), "width=3 is of mixer=conv"));
  Sizes without_cache = narrow;
  CHECK(mentions(layer_complaint(without_cache), "size 'cache'"));
  CHECK(mentions(layer_complaint(conv, {{"mixer", "conv"}, {"output-gate", "heads"}}),
                 "output-gate=heads is of mixer=attention"));
  CHECK(mentions(layer_complaint(with("state-dim", 16), options), "state-dim=16 is of mixer=ssd"));
  CHECK(mentions(layer_complaint(conv, {{"mixer", "ssd"}}), "mixer=ssd without state-dim"));
  CHECK(mentions(layer_complaint(with("gate-rank", 16), options), "gate-rank=16 is of mixer=kda"));
  CHECK(mentions(
      layer_complaint(with("v-dim", 16), {{"mixer", "gated-delta-rule"}, {"gate-bound", "-5"}}),
      "gate-bound=-5 is of mixer=kda"));
  Sizes ssd = with("state-dim", 16);
  CHECK(mentions(layer_complaint(ssd, {{"mixer", "ssd"}}), "mixer=ssd without state-groups"));
  ssd["state-groups"] = 2;
  CHECK(layer_complaint(ssd, {{"mixer", "ssd"}}) == "");
  ssd["state-dim"] = 17;
  CHECK(mentions(layer_complaint(ssd, {{"mixer", "ssd"}}),
                 "mixer=ssd: C begins at column 66 of rows of 100, which are more aligned"));
  ssd["state-dim"] = 16;
  ssd["state-groups"] = 3;
  CHECK(mentions(layer_complaint(ssd, {{"mixer", "ssd"}}), "state-groups=3 do not divide heads=4"));
  ssd["state-groups"] = 2;
  ssd["ranks"] = 2;
  CHECK(mentions(layer_complaint(ssd, {{"mixer", "ssd"}}), "mixer=ssd with ranks=2"));
}

TEST_CASE("a layer may be its mixer alone, or its network") {
  const auto models = models_with_states();
  const auto names = [&](std::size_t model) {
    Names all;
    for (const auto& tensor : layer_op().tensors(
             with_states(models[model], DeviceKind::cuda, DType::bf16, {{"batch", 2}})))
      if (tensor.role != Role::intermediate) all.push_back(tensor.name);
    return all;
  };
  CHECK(names(11) == Names{"x", "state_indices", "attn_norm", "w_in", "w_conv", "b_conv", "A_log",
                           "dt_bias", "D", "mixer_norm", "conv_state", "states", "w_o", "y"});
  CHECK(names(14) == Names{"x", "ffn_norm", "w_up", "w_down", "y"});
  CHECK(names(16) == Names{"x", "ffn_norm", "w_router", "choice_bias", "w_up", "w_down",
                           "w_shared_up", "w_shared_down", "y"});
  const Sizes llama{{"batch", 1}, {"d", 64}, {"heads", 4}, {"dim", 16}, {"cache", 24}};
  Sizes network{{"batch", 1}, {"d", 64}, {"h", 96}};
  CHECK(layer_complaint(llama, {{"ffn", "none"}}) == "");
  CHECK(mentions(layer_complaint(llama), "size 'h'"));
  CHECK(layer_complaint(network, {{"mixer", "none"}}) == "");
  CHECK(mentions(layer_complaint(network, {{"mixer", "none"}, {"ffn", "none"}}),
                 "mixer=none with ffn=none"));
  CHECK(mentions(layer_complaint(network, {{"mixer", "none"}, {"block", "parallel"}}),
                 "mixer=none with block=parallel"));
  CHECK(mentions(layer_complaint(network, {{"mixer", "none"}, {"out-bias", "yes"}}),
                 "out-bias=yes is of layers with a mixer"));
  CHECK(mentions(layer_complaint(network, {{"mixer", "none"}, {"act", "relu2"}}),
                 "act=relu2 with a gate"));
  CHECK(mentions(
      layer_complaint(network,
                      {{"mixer", "none"}, {"ffn", "plain"}, {"act", "relu2"}, {"ffn-bias", "yes"}}),
      "act=relu2 with ffn-bias=yes"));
  network["ranks"] = 2;
  CHECK(mentions(layer_complaint(network, {{"mixer", "none"}}), "mixer=none with ranks=2"));
  network.erase("ranks");
  network["heads"] = 4;
  CHECK(mentions(layer_complaint(network, {{"mixer", "none"}}), "heads=4 is of mixer=attention"));
  Sizes more = llama;
  more["h"] = 96;
  CHECK(mentions(layer_complaint(more, {{"ffn", "none"}}), "h=96 is of layers with"));
  CHECK(mentions(layer_complaint(llama, {{"ffn", "none"}, {"act", "gelu"}}),
                 "act=gelu is of layers with"));
}

TEST_CASE("states may be parts of pages, in the order of vLLM's") {
  const auto models = models_with_states();
  const auto in_pages = models[22];
  const auto tensors =
      layer_op().tensors(with_states(in_pages, DeviceKind::cuda, DType::bf16, {{"batch", 2}}));
  const auto shape = [&](const char* name) { return tensors[tensor_index(tensors, name)].shape; };
  CHECK(shape("states") == std::vector<std::int64_t>{7, 4 * 24 * 16 + 40});
  CHECK(shape("conv_state") == std::vector<std::int64_t>{7, 160 * 3 + 24});
  CHECK(shape("state_indices") == std::vector<std::int64_t>{2});
  const auto parts =
      layer_op().parts(with_states(in_pages, DeviceKind::cuda, DType::bf16, {{"batch", 2}}));
  const Problem &conv = part_named(parts, "conv")->problem,
                &rule = part_named(parts, "rule")->problem;
  CHECK(conv.size("slots") == 7);
  CHECK(conv.number("first-slot") == 1);
  CHECK_FALSE(conv.has("state-order", "channels"));
  CHECK_FALSE(rule.has("state-layout", "kv"));
  CHECK_FALSE(rule.has("null-index", "-1"));
  const auto of_bf16 =
      layer_op().parts(with_states(models[23], DeviceKind::cuda, DType::bf16, {{"batch", 2}}));
  CHECK(part_named(of_bf16, "conv")->problem.has("state-order", "channels"));
  CHECK(part_named(of_bf16, "rule")->problem.has("null-index", "-1"));
  CHECK(part_named(of_bf16, "rule")->problem.has("state-dtype", "bf16"));
  Sizes sizes = in_pages.sizes;
  sizes["batch"] = 2;
  Options options = in_pages.options;
  CHECK(layer_complaint(sizes, options) == "");
  options.erase("qkv-weights");
  CHECK(mentions(layer_complaint(sizes, options), "conv-order=entries with qkv-weights=separate"));
  options = in_pages.options;
  const auto with = [&](const char* name, std::int64_t size) {
    Sizes changed = sizes;
    changed[name] = size;
    return layer_complaint(changed, options);
  };
  CHECK(mentions(with("state-block", 100), "state-block=100 is less than"));
  CHECK(mentions(with("conv-block", 100), "state-row=100 is less than"));
  CHECK(mentions(with("conv-entries", 2), "entries=2 is less than width - 1"));
  CHECK(mentions(with("states", 1), "slots=1 is less than b=2"));
  const Sizes llama{{"batch", 1}, {"d", 64},     {"h", 96},    {"heads", 4},
                    {"dim", 16},  {"cache", 24}, {"states", 4}};
  CHECK(mentions(layer_complaint(llama), "states=4 is of mixer=conv"));
  Sizes bamba = models[5].sizes;
  bamba["batch"] = 2;
  CHECK(mentions(layer_complaint(bamba, {{"mixer", "ssd"}, {"state-layout", "vk"}}),
                 "state-layout=vk is of mixer=gated-delta-rule"));
}

TEST_CASE("attention and ssd read one norm, and add to the residual one after the other") {
  const auto models = models_with_states();
  const SmallModel &falcon = models[19], &usual = models[20];
  const auto parts =
      layer_op().parts(with_states(falcon, DeviceKind::cuda, DType::bf16, {{"batch", 2}}));
  Names names;
  for (const OpPart& part : parts) names.push_back(part.name);
  CHECK(names == Names{"attn_norm", "qkv", "attention", "out", "in", "conv", "ssd", "gated_norm",
                       "ssm_out", "ffn_norm", "ffn_gate", "ffn_up", "ffn_gated", "ffn_down"});
  CHECK(part_named(parts, "out")->tensor("y") == part_named(parts, "ssm_out")->tensor("residual"));
  Names tensors;
  for (const auto& tensor :
       layer_op().tensors(with_states(falcon, DeviceKind::cuda, DType::bf16, {{"batch", 2}})))
    if (tensor.role != Role::intermediate) tensors.push_back(tensor.name);
  CHECK(tensors == Names{"x",         "positions", "slots",      "lengths",    "state_indices",
                         "attn_norm", "w_q",       "w_k",        "w_v",        "w_in",
                         "in_scale",  "w_conv",    "b_conv",     "A_log",      "dt_bias",
                         "D",         "k_cache",   "v_cache",    "conv_state", "states",
                         "w_o",       "ffn_norm",  "w_gate",     "w_up",       "w_down",
                         "out_scale", "ssm_scale", "gate_scale", "ffn_scale",  "w_ssm_out",
                         "y"});
  Sizes sizes = usual.sizes;
  sizes["batch"] = 2;
  const Options both{{"mixer", "attention-ssd"}};
  CHECK(layer_complaint(sizes, both) == "");
  const auto with = [&](const char* name, const char* value) {
    Options options = both;
    options[name] = value;
    return options;
  };
  CHECK(mentions(layer_complaint(sizes, with("output-gate", "heads")),
                 "output-gate=heads is of mixer=attention"));
  Options plain = with("gate-scale", "yes");
  plain["ffn"] = "plain";
  CHECK(mentions(layer_complaint(sizes, plain), "gate-scale=yes with ffn=plain"));
  Options normless = with("mixer-norm", "none");
  normless["mixer-eps"] = "1e-5";
  CHECK(mentions(layer_complaint(sizes, normless), "with mixer-norm=none: it is of a norm"));
  sizes["ssm-heads"] = 7;
  CHECK(mentions(layer_complaint(sizes, both), "state-groups=3 do not divide ssm-heads=7"));
  sizes.erase("ssm-heads");
  CHECK(mentions(layer_complaint(sizes, both), "mixer=attention-ssd without ssm-heads"));
  CHECK(mentions(layer_complaint(sizes, {}), "is of mixer="));
}

TEST_CASE("columns of one product are read by their rows, with one convolution behind it") {
  const auto models = models_with_states();
  const auto parts = [&](std::size_t model) {
    return layer_op().parts(
        with_states(models[model], DeviceKind::cuda, DType::bf16, {{"batch", 2}}));
  };
  Names names;
  for (const OpPart& part : parts(5)) names.push_back(part.name);
  CHECK(names == Names{"attn_norm", "in", "conv", "ssd", "gated_norm", "out", "ffn_norm", "ffn"});
  const auto of_ssd = parts(5), of_rule = parts(7);
  const OpPart &core = *part_named(of_ssd, "ssd"), &rule = *part_named(of_rule, "rule");
  CHECK(core.tensor("dt") == "projected");
  CHECK(first_of(core, "dt") == 72 + 72 + 2 * 72);
  CHECK(first_of(core, "C") == 72 + 72);
  CHECK(first_of(core, "x") == 0);
  CHECK(rule.tensor("v") == "convolved");
  CHECK(first_of(rule, "v") == 64);
}

TEST_CASE("columns that are grouped by heads are read where they are") {
  const auto model = models_with_states()[17];
  const auto parts =
      layer_op().parts(with_states(model, DeviceKind::cuda, DType::bf16, {{"batch", 2}}));
  Names names;
  for (const OpPart& part : parts) names.push_back(part.name);
  CHECK(names == Names{"attn_norm", "in_qkvz", "in_ba", "conv", "rule", "gated_norm", "out",
                       "ffn_norm", "ffn"});
  // A head has 16 columns of q, 16 of k, 48 of v and 48 of z; 2 of b and 2 of a.
  const OpPart &conv = *part_named(parts, "conv"), &rule = *part_named(parts, "rule"),
               &norm = *part_named(parts, "gated_norm");
  CHECK(conv.problem.size("x-row") == 2 * 128);
  CHECK(conv.problem.size("x-keys") == 16);
  CHECK(rule.tensor("a") == "ba_projected");
  CHECK(first_of(rule, "a") == 2);
  CHECK(rule.problem.size("gate-block") == 4);
  CHECK(norm.tensor("z") == "qkvz_projected");
  CHECK(first_of(norm, "z") == 80);
  CHECK(norm.problem.size("z-row") == 128);
  Sizes kimi = model.sizes;
  kimi["batch"] = 2;
  kimi.erase("v-heads");
  CHECK(mentions(layer_complaint(kimi, {{"mixer", "kda"}, {"qkv-weights", "grouped"}}),
                 "qkv-weights=grouped with mixer=kda"));
  kimi["v-dim"] = 12;
  CHECK(mentions(layer_complaint(kimi, {{"mixer", "gated-delta-rule"}, {"qkv-weights", "grouped"}}),
                 "z begins at column 44 of rows of 56, which are more aligned"));
}

TEST_CASE("one launch of whole layers has neither output gates nor states") {
  const auto facts = facts_of_architecture("sm_90a");
  const Sizes llama{{"batch", 1}, {"d", 2048},     {"h", 8192},    {"heads", 32},
                    {"dim", 64},  {"kv-heads", 8}, {"cache", 2048}};
  const Sizes conv{{"batch", 1},  {"d", 2048}, {"h", 8192},
                   {"heads", 32}, {"dim", 64}, {"width", 3}};
  const auto refusals = [&](const Sizes& sizes, const Options& options) {
    std::size_t refused = 0;
    const Problem problem = layer_problem(DeviceKind::cuda, DType::bf16, sizes, options);
    for (const Family* family : layer::persistent_layers())
      refused += family->refusal(problem, facts) ? 1 : 0;
    return refused;
  };
  const std::size_t all = layer::persistent_layers().size();
  CHECK(refusals(llama, {}) == all - 1);
  CHECK(refusals(llama, {{"output-gate", "heads"}}) == all);
  CHECK(refusals(conv, {{"mixer", "conv"}}) == all);
}

TEST_CASE("layers with states are right on the CPU, in decode and prefill") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  for (const DType dtype : layer_op().dtypes(DeviceKind::cpu)) verify_states(*backend, dtype, 1);
}

TEST_CASE("attention beside ssd, factors of parts, and states in pages are right on the GPU",
          "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const SmallModel& model : models_with_states()) {
    if (!model.options.contains("gate-scale") && model.options.at("mixer") != "attention-ssd" &&
        !model.sizes.contains("states"))
      continue;
    CAPTURE(model.name);
    for (const Sizes& tokens : {Sizes{{"batch", 3}}, {{"batch", 2}, {"s", 5}}})
      verify_plan(*backend, layer_op(), with_states(model, DeviceKind::cuda, DType::bf16, tokens),
                  2);
  }
}

TEST_CASE("layers with states are right on the GPU, in decode and prefill", "[gpu][states]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const DType dtype : {DType::bf16, DType::f32}) verify_states(*backend, dtype, 0);
}
