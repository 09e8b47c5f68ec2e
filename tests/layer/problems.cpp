#include "layer/problems.hpp"

#include "core/error.hpp"
#include "support/error_of.hpp"

namespace fftune::test {

Problem layer_problem(DeviceKind kind, DType dtype, Sizes sizes, Options options) {
  return canonical(layer_op(), {"layer", "fwd", dtype, std::move(sizes), std::move(options)}, kind);
}

Sizes llama_sizes(std::int64_t d, std::int64_t h, std::int64_t dim, Sizes more) {
  more.insert({{"d", d}, {"h", h}, {"heads", 4}, {"kv-heads", 2}, {"dim", dim}});
  return more;
}

bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string layer_complaint(const Sizes& sizes, const Options& options) {
  return error_of([&] { layer_problem(DeviceKind::cuda, DType::bf16, sizes, options); });
}

namespace {

Sizes sizes(std::int64_t d, std::int64_t h, std::int64_t heads, std::int64_t kv_heads,
            std::int64_t dim) {
  return Sizes{{"d", d}, {"h", h}, {"heads", heads}, {"kv-heads", kv_heads}, {"dim", dim}};
}

Sizes with(Sizes of, const char* name, std::int64_t value) {
  of[name] = value;
  return of;
}

Sizes with_experts(Sizes of, std::int64_t experts, std::int64_t choices) {
  return with(with(std::move(of), "experts", experts), "top-k", choices);
}

}  // namespace

std::vector<SmallModel> small_models() {
  return {
      {"llama", sizes(72, 136, 4, 2, 16), {{"angles", "llama3"}, {"eps", "1e-5"}}},
      {"qwen2", sizes(56, 104, 4, 1, 24), {{"qkv-bias", "yes"}, {"base", "1000000"}}},
      {"qwen3", sizes(64, 120, 8, 2, 16), {{"qk-norm", "yes"}}},
      {"gemma2",
       with(sizes(48, 104, 4, 2, 32), "window", 12),
       {{"convention", "gemma"},
        {"post-norms", "yes"},
        {"act", "gelu-tanh"},
        {"softcap", "50"},
        {"scale", "0.0625"}}},
      {"gemma3",
       sizes(64, 96, 4, 1, 16),
       {{"convention", "gemma"}, {"post-norms", "yes"}, {"act", "gelu-tanh"}, {"qk-norm", "yes"}}},
      {"phi2",
       with(sizes(64, 136, 4, 4, 24), "rotary", 8),
       {{"norm", "layer"},
        {"block", "parallel"},
        {"ffn", "plain"},
        {"act", "gelu-tanh"},
        {"qkv-bias", "yes"},
        {"out-bias", "yes"},
        {"ffn-bias", "yes"}}},
      {"gpt2",
       sizes(48, 192, 3, 3, 16),
       {{"norm", "layer"},
        {"ffn", "plain"},
        {"act", "gelu-tanh"},
        {"qkv-bias", "yes"},
        {"out-bias", "yes"},
        {"ffn-bias", "yes"},
        {"rotation", "none"}}},
      {"qwen3moe",
       with_experts(sizes(512, 24, 4, 2, 16), 128, 8),
       {{"ffn", "moe"}, {"qk-norm", "yes"}, {"renormalise", "yes"}}},
      {"mixtral",
       with_experts(sizes(72, 136, 4, 2, 16), 6, 2),
       {{"ffn", "moe"}, {"order", "after"}, {"routing", "zipf:1"}, {"gate-up", "halves"}}},
      {"gemma with experts",
       with(with_experts(sizes(48, 40, 4, 1, 16), 5, 2), "shared", 1),
       {{"ffn", "moe"}, {"convention", "gemma"}, {"post-norms", "yes"}, {"score", "sigmoid"}}},
      {"granite",
       sizes(72, 136, 4, 2, 16),
       {{"residual-scale", "yes"}, {"scale", "0.02"}, {"out-bias", "yes"}, {"ffn-bias", "yes"}}},
      {"granite moe",
       with(with_experts(sizes(72, 40, 4, 2, 16), 6, 2), "shared-h", 56),
       {{"ffn", "moe"},
        {"order", "after"},
        {"residual-scale", "yes"},
        {"route-scale", "0.22"},
        {"gate-up", "halves"}}},
      {"olmo2", sizes(72, 104, 4, 2, 16), {{"post-norms", "only"}, {"qk-norm", "rows"}}},
      {"hunyuan", sizes(72, 104, 4, 2, 16), {{"qk-norm", "yes"}, {"qk-norm-order", "after"}}},
      {"falcon",
       sizes(64, 136, 6, 2, 24),
       {{"norm", "layer"},
        {"block", "parallel-norms"},
        {"qkv-weights", "grouped"},
        {"ffn", "plain"},
        {"act", "gelu"}}},
      {"persimmon",
       with(sizes(64, 136, 4, 4, 24), "rotary", 12),
       {{"norm", "layer"},
        {"qkv-weights", "grouped"},
        {"qk-norm", "layer"},
        {"ffn", "plain"},
        {"act", "gelu"},
        {"qkv-bias", "yes"},
        {"out-bias", "yes"},
        {"ffn-bias", "yes"}}},
      {"neox",
       with(sizes(64, 136, 4, 4, 24), "rotary", 8),
       {{"norm", "layer"},
        {"block", "parallel-norms"},
        {"ffn", "plain"},
        {"act", "gelu"},
        {"qkv-bias", "yes"},
        {"out-bias", "yes"},
        {"ffn-bias", "yes"}}},
      {"glm4",
       with(sizes(72, 136, 4, 2, 16), "rotary", 8),
       {{"post-norms", "yes"}, {"rotation", "interleaved"}, {"qkv-bias", "yes"}}},
      {"gpt-oss",
       with(with_experts(sizes(72, 40, 4, 2, 16), 6, 2), "window", 9),
       {{"ffn", "moe"},
        {"order", "after"},
        {"sinks", "yes"},
        {"router-bias", "yes"},
        {"act", "swiglu-oai"},
        {"gate-up", "interleaved"},
        {"qkv-bias", "yes"},
        {"out-bias", "yes"},
        {"ffn-bias", "yes"}}},
      {"deepseek's router",
       with(with(with(with_experts(sizes(256, 24, 4, 2, 16), 16, 3), "groups", 4), "top-groups", 2),
            "shared-h", 40),
       {{"ffn", "moe"},
        {"score", "sigmoid"},
        {"group-score", "top2"},
        {"choice-bias", "yes"},
        {"renormalise", "yes"},
        {"logits", "f32"},
        {"route-scale", "2.5"}}},
      {"qwen2moe",
       with(with_experts(sizes(72, 40, 4, 2, 16), 6, 2), "shared-h", 56),
       {{"ffn", "moe"}, {"qkv-bias", "yes"}, {"gate-up", "halves"}, {"shared-gate", "yes"}}},
      {"afmoe",
       with(with_experts(sizes(72, 40, 4, 2, 16), 6, 2), "shared-h", 56),
       {{"ffn", "moe"}, {"post-norms", "yes"}, {"score", "sigmoid"}, {"qk-norm", "yes"}}},
      {"mistral", with(sizes(72, 136, 4, 2, 16), "window", 9), {{"eps", "1e-5"}}},
      {"afmoe's attention",
       sizes(72, 104, 4, 2, 16),
       {{"post-norms", "yes"}, {"qk-norm", "yes"}, {"output-gate", "features"}}},
      {"qwen3.5's attention",
       sizes(72, 104, 4, 2, 16),
       {{"convention", "gemma"}, {"qk-norm", "yes"}, {"output-gate", "q-rows"}}},
      {"lfm3's attention", sizes(72, 104, 4, 2, 20), {{"output-gate", "heads"}}},
      {"gemma4's windows",
       with(sizes(72, 104, 4, 2, 16), "window", 9),
       {{"post-norms", "yes"},
        {"convention", "t5"},
        {"act", "gelu-tanh"},
        {"qk-norm", "yes"},
        {"v-norm", "yes"},
        {"scale", "1"},
        {"layer-scalar", "yes"}}},
      {"gemma4's wide heads",
       sizes(40, 72, 4, 1, 512),
       {{"post-norms", "yes"},
        {"convention", "t5"},
        {"act", "gelu-tanh"},
        {"qk-norm", "yes"},
        {"v-norm", "yes"},
        {"scale", "1"},
        {"layer-scalar", "yes"}}},
  };
}

std::vector<SmallModel> models_with_more_inputs() {
  return {
      {"gemma4's experts",
       with(with_experts(sizes(72, 24, 4, 2, 16), 6, 2), "shared-h", 56),
       {{"post-norms", "yes"},
        {"convention", "t5"},
        {"act", "gelu-tanh"},
        {"qk-norm", "yes"},
        {"v-norm", "yes"},
        {"scale", "1"},
        {"layer-scalar", "yes"},
        {"ffn", "moe"},
        {"renormalise", "yes"},
        {"gate-up", "halves"},
        {"expert-norms", "yes"},
        {"expert-scale", "yes"}}},
      {"gemma4's inputs",
       with(sizes(72, 104, 4, 2, 16), "input-h", 24),
       {{"post-norms", "yes"},
        {"convention", "t5"},
        {"act", "gelu-tanh"},
        {"qk-norm", "yes"},
        {"v-norm", "yes"},
        {"scale", "1"},
        {"layer-scalar", "yes"}}},
      {"gemma4's shared keys",
       with(with(sizes(72, 104, 4, 2, 16), "input-h", 24), "window", 9),
       {{"post-norms", "yes"},
        {"convention", "t5"},
        {"act", "gelu-tanh"},
        {"qk-norm", "yes"},
        {"keys", "shared"},
        {"scale", "1"}}},
      {"scaled queries", sizes(72, 104, 4, 2, 16), {{"query-scale", "rows"}}},
  };
}

}  // namespace fftune::test
