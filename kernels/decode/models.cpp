// Whole models: the layers that the op layer knows, with vocabulary and number of layers.
#include <algorithm>
#include <map>
#include <string>

#include "kernels/decode/decode.hpp"
#include "kernels/layer/layer.hpp"

namespace fftune::decoding {

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
    const auto whole = wholes.find(model.name);
    if (whole == wholes.end()) continue;
    model.sizes.insert({{"layers", whole->second.layers}, {"vocab", whole->second.vocab}});
    model.options.insert(whole->second.options.begin(), whole->second.options.end());
    models.push_back(std::move(model));
  }
  return models;
}

}  // namespace fftune::decoding
