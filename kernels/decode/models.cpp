// Whole models: the layers that the op layer knows, with vocabulary and number of layers.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/decode/decode.hpp"
#include "kernels/layer/layer.hpp"

namespace fftune::decoding {
namespace {

using Sizes = std::map<std::string, std::int64_t>;
using Options = std::map<std::string, std::string>;

/// A model with attention between other layers, which the op layer knows by the model's name.
struct Hybrid {
  std::int64_t layers, vocab, heads, kv_heads, dim, rotary;
  const char* pattern;  // a: attention
  Options options;      // of attention
};

const std::map<std::string, Hybrid>& hybrids() {
  const Options qwen{{"qk-norm", "yes"}, {"output-gate", "q-rows"}, {"base", "10000000"}};
  static const std::map<std::string, Hybrid> all{
      {"lfm2-1.2b",
       {16, 65536, 32, 8, 64, 64, "bbabbabbabababab", {{"qk-norm", "yes"}, {"base", "1000000"}}}},
      {"qwen3-next-80b-a3b", {48, 151936, 16, 2, 256, 64, "bbba", qwen}},
      {"qwen3.5-9b", {32, 248320, 16, 4, 256, 64, "bbba", qwen}},
      {"qwen3.5-0.8b", {24, 248320, 8, 2, 256, 64, "bbba", qwen}},
      {"granite-4.0-h-small",
       {40, 100352, 32, 8, 128, 0, "bbbbbabbbb", {{"rotation", "none"}, {"scale", "0.0078125"}}}}};
  return all;
}

/// The layers of attention, with the norms and the network of the others, which become layers b.
KnownModel with_attention(const KnownModel& states, const Hybrid& hybrid) {
  KnownModel model{states.name,
                   {{"layers", hybrid.layers},
                    {"vocab", hybrid.vocab},
                    {"heads", hybrid.heads},
                    {"kv-heads", hybrid.kv_heads},
                    {"dim", hybrid.dim}},
                   hybrid.options};
  if (hybrid.rotary != 0) model.sizes["rotary"] = hybrid.rotary;
  for (const char* name : {"d", "h", "experts", "top-k", "shared-h"})
    if (const auto size = states.sizes.find(name); size != states.sizes.end())
      model.sizes.insert(*size);
  for (const auto& [name, value] : states.options)
    if (name != "mixer" && name != "mixer-eps" && name != "conv-bias" && name != "qkv-weights")
      model.options.emplace(name, value);
  std::vector<std::string> fields;
  for (const auto& [name, value] : states.sizes)
    if (name != "d") fields.push_back(fmt::format("{}={}", name, value));
  for (const auto& [name, value] : states.options)
    if (name != "mixer") fields.push_back(fmt::format("{}={}", name, value));
  model.options["layers-b"] =
      fmt::format("{}:{}", states.options.at("mixer"), fmt::join(fields, ","));
  model.options["pattern"] = hybrid.pattern;
  return model;
}

}  // namespace

std::vector<KnownModel> known_models() {
  struct Whole {
    std::int64_t layers, vocab;
    std::map<std::string, std::string> options = {};
  };
  static const std::map<std::string, Whole> wholes{
      {"llama-3.2-1b", {16, 128256}},       {"llama-3.1-8b", {32, 128256}},
      {"qwen2.5-7b", {28, 152064}},         {"qwen3-8b", {36, 151936}},
      {"mistral-7b", {32, 32768}},          {"phi-2", {32, 51200, {{"head-bias", "yes"}}}},
      {"phi-3-mini", {32, 32064}},          {"mixtral-8x7b", {32, 32000}},
      {"qwen3-30b-a3b", {48, 151936}},      {"qwen3-235b-a22b", {94, 151936}},
      {"olmo-2-1b", {16, 100352}},          {"olmo-2-7b", {32, 100352}},
      {"glm-4-9b", {40, 151552}},           {"pythia-6.9b", {32, 50432}},
      {"qwen2-57b-a14b", {28, 151936}},     {"llama-3.1-8b-int4", {32, 128256}},
      {"qwen3-30b-a3b-int4", {48, 151936}}, {"qwen2-57b-a14b-int4", {28, 151936}}};
  std::vector<KnownModel> models;
  for (KnownModel model : layer::known_models()) {
    if (const auto hybrid = hybrids().find(model.name); hybrid != hybrids().end())
      models.push_back(with_attention(model, hybrid->second));
    const auto whole = wholes.find(model.name);
    if (whole == wholes.end()) continue;
    model.sizes.insert({{"layers", whole->second.layers}, {"vocab", whole->second.vocab}});
    model.options.insert(whole->second.options.begin(), whole->second.options.end());
    models.push_back(std::move(model));
  }
  return models;
}

}  // namespace fftune::decoding
