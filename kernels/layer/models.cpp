// The layers of published models: the fields of their configurations.
#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "kernels/gemm/packed/known_model.hpp"
#include "kernels/layer/layer.hpp"

namespace fftune::layer {
namespace {

using Options = std::map<std::string, std::string>;

struct Heads {
  std::int64_t q, kv, dim;
};

KnownModel model(const char* name, std::int64_t d, std::int64_t h, Heads heads, Options options) {
  return {name,
          {{"d", d}, {"h", h}, {"heads", heads.q}, {"kv-heads", heads.kv}, {"dim", heads.dim}},
          std::move(options)};
}

Options llama3(const char* factor) {
  return {{"eps", "1e-05"}, {"angles", "llama3"}, {"base", "500000"}, {"factor", factor}};
}

/// Scores are multiplied by 1 / sqrt(256).
Options gemma() {
  return {
      {"convention", "gemma"}, {"post-norms", "yes"}, {"act", "gelu-tanh"}, {"scale", "0.0625"}};
}

/// A mixture whose weights of a token add up to 1; gate and up are packed as transformers has them.
Options moe() {
  return {{"ffn", "moe"}, {"renormalise", "yes"}, {"gate-up", "halves"}, {"base", "1000000"}};
}

Options gpt() {
  return {{"norm", "layer"},   {"eps", "1e-05"},    {"ffn", "plain"},   {"act", "gelu-tanh"},
          {"qkv-bias", "yes"}, {"out-bias", "yes"}, {"ffn-bias", "yes"}};
}

/// Its angles have a rule of their own, between yarn's whole pairs.
Options gpt_oss() {
  return {{"ffn", "moe"},      {"order", "after"},         {"act", "swiglu-oai"},
          {"eps", "1e-05"},    {"gate-up", "interleaved"}, {"router-bias", "yes"},
          {"sinks", "yes"},    {"angles", "table"},        {"qkv-bias", "yes"},
          {"out-bias", "yes"}, {"ffn-bias", "yes"}};
}

/// Experts are chosen by sigmoids with a bias, in float32.
Options glm_moe() {
  return {{"ffn", "moe"},         {"score", "sigmoid"}, {"choice-bias", "yes"},
          {"renormalise", "yes"}, {"logits", "f32"},    {"gate-up", "halves"},
          {"qkv-bias", "yes"},    {"eps", "1e-05"},     {"base", "1000000"}};
}

Options with(Options options, const Options& more) {
  options.insert(more.begin(), more.end());
  return options;
}

/// Layers without a window rotate the first and last features of a head alone: a table has their
/// angles.
Options gemma4() {
  return {{"convention", "t5"}, {"post-norms", "yes"}, {"act", "gelu-tanh"},   {"qk-norm", "yes"},
          {"v-norm", "yes"},    {"scale", "1"},        {"layer-scalar", "yes"}};
}

/// Experts beside a network, each with norms of their own.
Options gemma4_experts() {
  return {{"ffn", "moe"},
          {"renormalise", "yes"},
          {"gate-up", "halves"},
          {"expert-norms", "yes"},
          {"expert-scale", "yes"}};
}

/// Latent attention, and experts whose logits are float32. Neighbours are rotated.
Options latent(const char* scale) {
  return {{"mixer", "mla"}, {"rotation", "interleaved"}, {"angles", "table"},  {"scale", scale},
          {"ffn", "moe"},   {"logits", "f32"},           {"gate-up", "halves"}};
}

/// Experts are chosen by sigmoids with a bias.
Options by_sigmoids(Options options, const char* scale) {
  return with(std::move(options), {{"score", "sigmoid"},
                                   {"choice-bias", "yes"},
                                   {"renormalise", "yes"},
                                   {"route-scale", scale}});
}

/// Models with latent attention: their layers with experts. Hybrid models: their layers without
/// attention.
std::vector<KnownModel> models_of_mixers() {
  const Options by_halves{{"rope-order", "halves"}};
  const Options delta{
      {"mixer", "gated-delta-rule"}, {"convention", "gemma"}, {"qkv-weights", "packed"}};
  Options by_heads = delta;
  by_heads["qkv-weights"] = "grouped";
  const Options mixture{
      {"ffn", "moe"}, {"renormalise", "yes"}, {"gate-up", "halves"}, {"shared-gate", "yes"}};
  const auto latent_sizes = [](std::int64_t d, std::int64_t h, std::int64_t heads,
                               std::int64_t experts, std::int64_t choices,
                               std::map<std::string, std::int64_t> more) {
    more.insert({{"d", d},
                 {"h", h},
                 {"heads", heads},
                 {"experts", experts},
                 {"top-k", choices},
                 {"nope", 128},
                 {"rope", 64},
                 {"v-dim", 128},
                 {"rank", 512}});
    return more;
  };
  const auto delta_sizes = [](std::int64_t d, std::int64_t h, std::int64_t v_heads) {
    return std::map<std::string, std::int64_t>{{"d", d},     {"h", h},       {"heads", 16},
                                               {"dim", 128}, {"v-dim", 128}, {"v-heads", v_heads},
                                               {"width", 4}};
  };
  Options small4 =
      with(latent("0.19497"), with(by_halves, {{"renormalise", "yes"}, {"query-scale", "rows"}}));
  small4["logits"] = "same";
  auto next = delta_sizes(2048, 512, 32);
  next.insert({{"experts", 512}, {"top-k", 10}, {"shared-h", 512}});
  return {{"deepseek-v2-lite", latent_sizes(2048, 1408, 16, 64, 6, {{"shared-h", 2816}}),
           latent("0.11472")},
          {"deepseek-v3",
           latent_sizes(7168, 2048, 128, 256, 8,
                        {{"q-rank", 1536}, {"groups", 8}, {"top-groups", 4}, {"shared-h", 2048}}),
           with(by_sigmoids(latent("0.13523"), "2.5"), with(by_halves, {{"group-score", "top2"}}))},
          {"kimi-k2", latent_sizes(7168, 2048, 64, 384, 8, {{"q-rank", 1536}, {"shared-h", 2048}}),
           with(by_sigmoids(latent("0.13086"), "2.827"), with(by_halves, {{"eps", "1e-05"}}))},
          {"glm-4.7-flash",
           latent_sizes(2048, 1536, 20, 64, 4,
                        {{"nope", 192}, {"v-dim", 256}, {"q-rank", 768}, {"shared-h", 1536}}),
           with(by_sigmoids(latent("0.0625"), "1.8"), with(by_halves, {{"eps", "1e-05"}}))},
          {"mistral-small-4",
           latent_sizes(4096, 2048, 32, 128, 4,
                        {{"nope", 64}, {"rank", 256}, {"q-rank", 1024}, {"shared-h", 2048}}),
           small4},
          {"qwen3-next-80b-a3b", next, with(mixture, by_heads)},
          {"qwen3.5-27b", delta_sizes(5120, 17408, 48), delta},
          {"qwen3.5-9b", delta_sizes(4096, 12288, 32), delta},
          {"qwen3.5-4b", delta_sizes(2560, 9216, 32), delta},
          {"qwen3.5-0.8b", delta_sizes(1024, 3584, 16), delta},
          {"kimi-linear-48b-a3b",
           {{"d", 2304},
            {"h", 1024},
            {"heads", 32},
            {"dim", 128},
            {"v-dim", 128},
            {"width", 4},
            {"gate-rank", 128},
            {"experts", 256},
            {"top-k", 8},
            {"shared-h", 1024}},
           by_sigmoids({{"mixer", "kda"},
                        {"ffn", "moe"},
                        {"logits", "f32"},
                        {"gate-up", "halves"},
                        {"eps", "1e-05"},
                        {"mixer-eps", "1e-05"}},
                       "2.446")},
          {"granite-4.0-h-small",
           {{"d", 4096},
            {"h", 768},
            {"heads", 128},
            {"dim", 64},
            {"state-dim", 128},
            {"state-groups", 1},
            {"width", 4},
            {"experts", 72},
            {"top-k", 10},
            {"shared-h", 1536}},
           {{"mixer", "ssd"},
            {"conv-bias", "yes"},
            {"ffn", "moe"},
            {"order", "after"},
            {"gate-up", "halves"},
            {"residual-scale", "yes"},
            {"route-scale", "0.22"},
            {"eps", "1e-05"},
            {"mixer-eps", "1e-05"}}},
          {"lfm2-1.2b",
           {{"d", 2048}, {"h", 8192}, {"heads", 32}, {"dim", 64}, {"width", 3}},
           {{"mixer", "conv"}, {"eps", "1e-05"}}}};
}

}  // namespace

std::vector<KnownModel> known_models() {
  std::vector<KnownModel> models{
      model("llama-3.2-1b", 2048, 8192, {32, 8, 64}, llama3("32")),
      model("llama-3.1-8b", 4096, 14336, {32, 8, 128}, llama3("8")),
      model("qwen2.5-7b", 3584, 18944, {28, 4, 128}, {{"qkv-bias", "yes"}, {"base", "1000000"}}),
      model("qwen3-8b", 4096, 12288, {32, 8, 128}, {{"qk-norm", "yes"}, {"base", "1000000"}}),
      model("mistral-7b", 4096, 14336, {32, 8, 128}, {{"eps", "1e-05"}, {"base", "1000000"}}),
      // The layers with a window: those without have none, and Gemma 3's another base.
      model("gemma-2-9b", 3584, 14336, {16, 8, 256}, with(gemma(), {{"softcap", "50"}})),
      model("gemma-3-4b", 2560, 10240, {8, 4, 256}, with(gemma(), {{"qk-norm", "yes"}})),
      model("gemma-4-31b", 5376, 21504, {32, 16, 256}, gemma4()),
      model("gemma-4-31b-global", 5376, 21504, {32, 4, 512}, with(gemma4(), {{"angles", "table"}})),
      model("gemma-4-26b-a4b", 2816, 704, {16, 8, 256}, with(gemma4(), gemma4_experts())),
      model("gemma-4-26b-a4b-global", 2816, 704, {16, 2, 512},
            with(with(gemma4(), gemma4_experts()), {{"angles", "table"}})),
      // The layers with keys of their own.
      model("gemma-4-e2b", 1536, 6144, {8, 1, 256}, gemma4()),
      model("gemma-4-e4b", 2560, 10240, {8, 2, 256}, gemma4()),
      model("phi-2", 2560, 10240, {32, 32, 80}, with(gpt(), {{"block", "parallel"}})),
      model("phi-3-mini", 3072, 8192, {32, 32, 96}, {{"eps", "1e-05"}}),
      model("mixtral-8x7b", 4096, 14336, {32, 8, 128}, with(moe(), {{"eps", "1e-05"}})),
      model("qwen3-30b-a3b", 2048, 768, {32, 4, 128}, with(moe(), {{"qk-norm", "yes"}})),
      model("qwen3-235b-a22b", 4096, 1536, {64, 4, 128}, with(moe(), {{"qk-norm", "yes"}})),
      model("olmo-2-1b", 2048, 8192, {16, 16, 128},
            {{"post-norms", "only"}, {"qk-norm", "rows"}, {"base", "500000"}}),
      model("olmo-2-7b", 4096, 11008, {32, 32, 128},
            {{"post-norms", "only"}, {"qk-norm", "rows"}, {"base", "500000"}}),
      // The layers with a window.
      model("gpt-oss-20b", 2880, 2880, {64, 8, 64}, gpt_oss()),
      model("granite-3.3-8b", 4096, 12800, {32, 8, 128},
            {{"eps", "1e-05"},
             {"base", "10000000"},
             {"scale", "0.0078125"},
             {"residual-scale", "yes"}}),
      model("glm-4-9b", 4096, 13696, {32, 2, 128},
            {{"eps", "1e-05"},
             {"post-norms", "yes"},
             {"rotation", "interleaved"},
             {"qkv-bias", "yes"}}),
      model("glm-4.5-air", 4096, 1408, {96, 8, 128}, glm_moe()),
      // The layers with RoPE.
      model("smollm3-3b", 2048, 11008, {16, 4, 128}, {{"base", "5000000"}}),
      model(
          "pythia-6.9b", 4096, 16384, {32, 32, 128},
          with({{"act", "gelu"}, {"block", "parallel-norms"}, {"qkv-weights", "grouped"}}, gpt())),
      model("qwen2-57b-a14b", 3584, 2560, {28, 4, 128},
            {{"ffn", "moe"},
             {"gate-up", "halves"},
             {"shared-gate", "yes"},
             {"qkv-bias", "yes"},
             {"base", "1000000"}}),
      model("gpt2", 768, 3072, {12, 12, 64}, with(gpt(), {{"rotation", "none"}}))};
  const auto add = [&](const char* name, const char* size, std::int64_t value) {
    for (KnownModel& known : models)
      if (known.name == name) known.sizes[size] = value;
  };
  const auto add_experts = [&](const char* name, std::int64_t experts, std::int64_t choices) {
    add(name, "experts", experts);
    add(name, "top-k", choices);
  };
  add_experts("mixtral-8x7b", 8, 2);
  add_experts("qwen3-30b-a3b", 128, 8);
  add_experts("qwen3-235b-a22b", 128, 8);
  add_experts("gpt-oss-20b", 32, 4);
  add_experts("glm-4.5-air", 128, 8);
  add_experts("qwen2-57b-a14b", 64, 8);
  add("glm-4.5-air", "shared-h", 1408);
  add("qwen2-57b-a14b", "shared-h", 20480);
  add("gpt-oss-20b", "window", 128);
  add("glm-4-9b", "rotary", 64);
  add("glm-4.5-air", "rotary", 64);
  add("pythia-6.9b", "rotary", 32);
  add("gemma-2-9b", "window", 4096);
  add("gemma-3-4b", "window", 1024);
  add("gemma-4-31b", "window", 1024);
  add("gemma-4-26b-a4b", "window", 1024);
  for (const char* name : {"gemma-4-26b-a4b", "gemma-4-26b-a4b-global"}) {
    add_experts(name, 128, 8);
    add(name, "shared-h", 2112);
  }
  for (const char* name : {"gemma-4-e2b", "gemma-4-e4b"}) {
    add(name, "window", 512);
    add(name, "input-h", 256);
  }
  add("phi-2", "rotary", 32);
  add("phi-3-mini", "window", 2047);
  // With the weights that are published in 4 bits.
  const auto add_packed = [&](std::string_view name, const char* format, const Options& more) {
    models.push_back(
        packed_model(*std::find_if(models.begin(), models.end(),
                                   [&](const KnownModel& known) { return known.name == name; }),
                     format));
    models.back().options.insert(more.begin(), more.end());
  };
  add_packed("gpt-oss-20b", "mxfp4", {{"attn-weights", "dense"}});
  for (const char* name : {"llama-3.1-8b", "qwen3-30b-a3b", "glm-4.5-air", "qwen2-57b-a14b"})
    add_packed(name, "int4", {});
  for (KnownModel& known : models_of_mixers()) models.push_back(std::move(known));
  return models;
}

}  // namespace fftune::layer
