#include "apps/fftune/command_line/op_purposes.hpp"

#include <algorithm>

namespace fftune::tool {
namespace {

struct Purpose {
  const char* name;
  std::vector<std::string_view> ops;
};

const std::vector<Purpose>& purposes() {
  static const std::vector<Purpose> all{
      {"feed-forward networks", {"ffn", "moe-ffn", "moe-route", "masked-ffn"}},
      {"linear layers and their weights", {"linear", "masked-linear", "pack-weight"}},
      {"attention",
       {"qkv", "rope", "attention", "mla", "mla-rope", "head-linear", "indexer", "pack-mask",
        "masked-softmax"}},
      {"linear attention", {"gated-delta-rule", "ssd", "causal-conv1d", "gated-rmsnorm"}},
      {"norms and elementwise work", {"rmsnorm", "layernorm", "bias-gelu", "act-mul", "scale"}},
      {"whole layers and models", {"layer", "decode"}},
      {"logits and the next token", {"head", "sample", "ngram-block"}},
      {"losses", {"cross-entropy", "linear-cross-entropy"}},
      {"several GPUs", {"all-reduce", "all-argmax"}},
      {"Other ops", {}},
  };
  return all;
}

std::string heading_of_purpose(const Purpose& purpose) {
  return std::string(purpose.ops.empty() ? "" : "Ops for ") + purpose.name;
}

}  // namespace

std::vector<std::string> op_purposes() {
  std::vector<std::string> names;
  for (const Purpose& each : purposes()) names.push_back(heading_of_purpose(each));
  return names;
}

std::string purpose_of(std::string_view op) {
  for (const Purpose& each : purposes())
    if (std::find(each.ops.begin(), each.ops.end(), op) != each.ops.end())
      return heading_of_purpose(each);
  return heading_of_purpose(purposes().back());
}

}  // namespace fftune::tool
