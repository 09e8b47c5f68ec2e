// The layers of published models: the fields of their configurations.
#include <string>

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

}  // namespace

std::vector<KnownModel> known_models() {
  std::vector<KnownModel> models{
      model("llama-3.2-1b", 2048, 8192, {32, 8, 64}, llama3("32")),
      model("llama-3.1-8b", 4096, 14336, {32, 8, 128}, llama3("8")),
      model("qwen2.5-7b", 3584, 18944, {28, 4, 128}, {{"qkv-bias", "yes"}, {"base", "1000000"}}),
      model("qwen3-8b", 4096, 12288, {32, 8, 128}, {{"qk-norm", "yes"}, {"base", "1000000"}}),
      model("mistral-7b", 4096, 14336, {32, 8, 128}, {{"eps", "1e-05"}, {"base", "1000000"}})};
  return models;
}

}  // namespace fftune::layer
