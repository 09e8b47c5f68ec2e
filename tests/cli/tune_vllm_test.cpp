// fftune tune-vllm: the problems that it finds for a model, and those that it refuses.
// python/tests/test_vllm_tuning.py holds them to what the plugin runs.
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "apps/fftune/search/vllm_problems.hpp"
#include "core/error.hpp"
#include "sandbox.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"

using namespace fftune;
using namespace fftune::tool;
using fftune::testing::Sandbox;
using fftune::testing::write_text;

namespace {

constexpr const char* llama = R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "sliding_window": null})";
constexpr const char* mixture = R"({"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 40960, "mlp_only_layers": []})";

constexpr const char* gemma = R"({"architectures": ["Gemma3ForCausalLM"], "hidden_size": 2560,
    "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    "sliding_window": 1024, "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh"})";
constexpr const char* gpt_oss = R"({"architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 4, "swiglu_limit": 7.0, "sliding_window": 128,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16"})";

/// The configuration with more fields. The first field of a name counts.
std::string with(std::string_view config, const std::string& fields) {
  return "{" + fields + "," + std::string(config.substr(1));
}

VllmProblems problems_of(const std::string& config, const VllmServing& serving = {}) {
  return vllm_problems(builtin_catalog(), parse_json(config), serving, DeviceKind::cuda);
}

/// "op problem" of each, in order.
std::vector<std::string> texts(const VllmProblems& found) {
  std::vector<std::string> lines;
  for (const SearchedOp& each : found.ops)
    for (const Problem& problem : each.problems) lines.push_back(problem.text());
  return lines;
}

bool has(const VllmProblems& found, const std::string& part) {
  const auto lines = texts(found);
  return std::any_of(lines.begin(), lines.end(),
                     [&](const std::string& line) { return line.find(part) != std::string::npos; });
}

std::string refusal(const std::string& config, const VllmServing& serving = {}) {
  return test::error_of(ErrorKind::invalid_input, [&] { problems_of(config, serving); });
}

}  // namespace

TEST_CASE("vLLM captures graphs of 51 sizes, fewer for fewer sequences") {
  const auto all = graph_sizes(1024);
  REQUIRE(all.size() == 51);
  CHECK(std::vector(all.begin(), all.begin() + 6) == std::vector<std::int64_t>{1, 2, 4, 8, 16, 24});
  CHECK(all[34] == 256);
  CHECK(all[35] == 272);
  CHECK(all.back() == 512);
  CHECK(graph_sizes(20) == std::vector<std::int64_t>{1, 2, 4, 8, 16});
}

TEST_CASE("a dense model has the ops of a layer, for each size of a graph") {
  const auto found = problems_of(llama);
  CHECK(found.left_alone.empty());
  REQUIRE(found.ops.size() == 5);
  for (const SearchedOp& each : found.ops)
    CHECK(each.problems.size() == (each.op->name() == "ffn" ? 20 : 10));
  // Two numbers of tokens have prompts, in which no part of the op layer runs.
  const auto prompts = problems_of(llama, {.prompts = true});
  for (const SearchedOp& each : prompts.ops)
    CHECK(each.problems.size() == (each.op->name() == "ffn" ? 22 : 12));
  CHECK(has(prompts,
            "attention/fwd bf16 layout=thd lengths=yes mask=causal b=4 dim=128 heads=32 kv=131072 "
            "kv-heads=8 page=16 s=4096"));
  CHECK(has(found,
            "attention/fwd bf16 lengths=yes mask=none b=512 dim=128 heads=32 kv=131072 "
            "kv-heads=8 page=16 pages=32768 s=1"));
  CHECK(has(found, "ffn/fwd bf16 act=silu norm=rms residual=yes d=4096 h=14336 m=1"));
  CHECK(problems_of(llama, {.every_graph = true}).ops.front().problems.size() == 51);
  CHECK(problems_of(llama, {.tokens = {3, 7}}).ops.front().problems.size() == 2);
  CHECK(has(problems_of(llama, {.max_model_len = 1000, .block_size = 32}),
            "b=1 dim=128 heads=32 kv=1024 kv-heads=8 page=32 s="));
}

TEST_CASE("a device has its slice, and no residual before the sum over devices") {
  const auto found = problems_of(llama, {.tensor_parallel = 16, .tokens = {1}, .ranks = true});
  CHECK(has(found, "heads=2 kv-heads=1 m=1"));  // copies of the 8 heads of k and v
  CHECK(has(found, "linear/fwd bf16 k=256 m=1 n=4096"));
  CHECK(has(found, "ffn/fwd bf16 act=silu d=4096 h=896 m=1"));
  CHECK(has(found, "rmsnorm/fwd bf16 convention=llama eps=1e-06 residual=yes"));
  CHECK(refusal(llama, {.tensor_parallel = 3, .ranks = true}) == "--tp 3 does not divide 32 heads");
  CHECK(refusal(llama, {.tensor_parallel = 32, .ranks = true}).empty());
  CHECK(refusal(mixture, {.tensor_parallel = 512, .layers = false}) ==
        "--tp 512 does not divide 768 features of an expert");
}

TEST_CASE("a mixture has experts, also for batches with prompts") {
  const auto found = problems_of(mixture);
  CHECK(has(found,
            "moe-ffn/fwd bf16 act=silu gate-up=halves routing=uniform d=2048 experts=128 "
            "h=768 m=4096 top-k=8"));
  CHECK(has(found, "norm=yes"));
  CHECK(has(found, "linear/fwd bf16 k=2048 m=8 n=128"));
  CHECK(has(found, "moe-route/fwd bf16"));
  CHECK_FALSE(has(problems_of(mixture, {.tensor_parallel = 2}), "moe-route/fwd"));
  // Layers of mixtures run batches with prompts without asking, and all do with batch invariance.
  using Case = std::tuple<std::string, VllmServing, bool>;
  for (const auto& [model, serving, has_prompts] :
       {Case(mixture, {}, true), Case(mixture, {.tensor_parallel = 2}, false),
        Case(with(mixture, R"("decoder_sparse_step": 2)"), {}, false), Case(llama, {}, false),
        Case(llama, {.batch_invariant = true}, true)})
    CHECK(has(problems_of(model, serving), " layout=thd ") == has_prompts);
  CHECK_FALSE(has(found, "ffn/fwd bf16 act=silu norm=rms"));
  CHECK(has(problems_of(with(mixture, R"("decoder_sparse_step": 2)")), "h=6144"));
  CHECK(problems_of(mixture, {.layers = false}).ops.size() == 1);
  CHECK_FALSE(has(problems_of(mixture, {.experts = false}), "moe-ffn"));
}

TEST_CASE("biases are those of the architecture") {
  CHECK(has(problems_of(with(llama, R"("attention_bias": true)")), "linear/fwd bf16 bias=yes"));
  auto qwen2 = std::string(llama);
  qwen2.replace(qwen2.find("Llama"), 5, "Qwen2");
  CHECK(has(problems_of(qwen2), "qkv/fwd bf16 bias=yes cache=yes"));
  CHECK_FALSE(has(problems_of(qwen2), "linear/fwd bf16 bias=yes"));
}

TEST_CASE("fp8 with block scales is for the experts alone") {
  const auto found = problems_of(
      with(mixture,
           R"("quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]})"));
  REQUIRE(found.ops.size() == 1);
  CHECK(has(found, "moe-ffn/fwd fp8 act=silu gate-up=halves routing=uniform scales=block"));
  CHECK(found.left_alone == std::vector<std::string>{"layers stay vLLM's: quantised weights"});
}

TEST_CASE("with batch invariance every problem has the option whose op has it") {
  for (const auto& model : {mixture, llama}) {
    const auto all = problems_of(model, {.tokens = {4}, .batch_invariant = true});
    CHECK(all.left_alone.empty());
    CHECK(texts(all).size() >= 5);
    for (const std::string& text : texts(all))
      CHECK((text.find(" batch-invariant=yes ") != std::string::npos) !=
            text.starts_with("moe-route"));
  }
  const auto experts =
      problems_of(mixture, {.tokens = {4}, .layers = false, .batch_invariant = true});
  CHECK(texts(experts) ==
        std::vector<std::string>{"moe-ffn/fwd bf16 act=silu batch-invariant=yes gate-up=halves "
                                 "routing=uniform d=2048 experts=128 h=768 m=4 top-k=8"});
}

TEST_CASE("a model that stays vLLM's is an error with the reason") {
  const auto reason = [](const std::string& base, const std::string& fields) {
    return refusal(with(base, fields));
  };
  const std::string start = "there is nothing to search: layers stay vLLM's: ";
  CHECK(refusal(R"({"architectures": ["GemmaForCausalLM"]})") ==
        start +
            "GemmaForCausalLM is not Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, gpt-oss, Gemma 2 or "
            "Gemma 3");
  CHECK(reason(llama, R"("quantization_config": {"quant_method": "awq"})") ==
        start +
            "quantised weights; linear layers stay vLLM's: weights of an unknown number of bits");
  CHECK(reason(llama, R"("quantization_config": {"quant_method": "bitsandbytes"})") ==
        start + "quantised weights");
  CHECK(reason(llama, R"("is_causal": false)") == start + "attention that is not causal");
  CHECK(reason(llama, R"("dtype": "float16")") == start + "elements of float16");
  CHECK(reason(llama, R"("mlp_bias": true)") == start + "biases of the network");
  CHECK(reason(llama, R"("hidden_act": "gelu")") == start + "the activation gelu");
  CHECK(refusal(llama, {.layers = false}) ==
        "there is nothing to search: LlamaForCausalLM has no experts");
  CHECK(reason(mixture, R"("swiglu_limit": 7.0, "dtype": "float16")") ==
        start + "elements of float16; experts stay vLLM's: a clamped activation, or biases");
}

TEST_CASE("attention has the windows of all layers") {
  auto mistral = std::string(llama);
  mistral.replace(mistral.find("Llama"), 5, "Mistral");
  const std::string types = R"(, "layer_types": ["sliding_attention", "full_attention"])";
  const std::string window = R"("sliding_window": 4096)";
  using Case = std::tuple<std::string, bool, bool>;  // has a window, and layers without one
  for (const auto& [config, slides, sees_all] :
       {Case(mistral, false, true), Case(with(mistral, window), true, false),
        Case(with(mistral, window + types), true, true),
        Case(with(mistral, window + R"(, "use_sliding_window": false)"), false, true)}) {
    const auto found = problems_of(config, {.tokens = {1}});
    const auto lines = texts(found);
    for (const auto& [end, expected] :
         {std::pair(" s=1 window=4096", slides), std::pair(" s=1", sees_all)})
      CHECK(std::any_of(lines.begin(), lines.end(), [&, end = end](const std::string& line) {
              return line.find("mask=none b=1 dim=128") != line.npos && line.ends_with(end);
            }) == expected);
  }
}

TEST_CASE("Gemma has the parts of the op layer") {
  const auto found = problems_of(gemma, {.tokens = {2}});
  CHECK(found.left_alone.empty());
  CHECK(has(found, "rmsnorm/fwd bf16 convention=gemma eps=1e-06 residual=after"));
  CHECK(has(found, "ffn/fwd bf16 act=gelu-tanh d=2560 h=10240 m=2"));
  CHECK(has(found, "convention=gemma"));
  CHECK(has(found, "scale=0.125 b=2 dim=256 heads=8 kv=8192 kv-heads=4 page=16 "));
  CHECK(has(found, "s=1 window=1024"));
  CHECK_FALSE(has(found, "linear/fwd bf16 residual=yes"));
  auto second = std::string(gemma);
  second.replace(second.find("Gemma3"), 6, "Gemma2");
  CHECK(has(problems_of(with(second, R"("attn_logit_softcapping": 50.0)"), {.tokens = {2}}),
            "softcap=50"));
  // A rank of a group has a slice, and the sums are those of the group.
  const auto slice = problems_of(gemma, {.tensor_parallel = 2, .tokens = {2}, .ranks = true});
  CHECK(has(slice, "h=5120"));
  CHECK_FALSE(has(slice, "all-reduce"));
  CHECK(refusal(gemma, {.batch_invariant = true}).find("the op layer alone computes") !=
        std::string::npos);
  // vLLM runs the model with vision by the same layers.
  const std::string_view sizes(std::string_view(gemma).substr(std::string_view(gemma).find(',')));
  const std::string text = R"({"model_type": "gemma3_text")" + std::string(sizes);
  CHECK(texts(problems_of(
            R"({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": )" + text + "}",
            {.tokens = {2}})) == texts(found));
}

TEST_CASE("gpt-oss has the parts of the op layer, and its prompts run by ops in bfloat16") {
  for (const bool is_packed : {false, true}) {
    const std::string config =
        is_packed ? with(gpt_oss, R"("quantization_config": {"quant_method": "mxfp4"})") : gpt_oss;
    const auto found = problems_of(config);
    CHECK(has(found, "linear/fwd bf16 bias=yes residual=yes k=4096 m=1 n=2880"));
    CHECK(has(found, "linear/fwd bf16 bias=yes k=2880 m=1 n=32"));
    CHECK(has(found,
              "sinks=yes b=1 dim=64 heads=64 kv=131072 kv-heads=8 page=16 s=1 "
              "window=128"));
    CHECK(has(found, "moe-route/fwd bf16 order=after "));
    CHECK(has(found, is_packed ? "weights=mxfp4" : "gate-up=interleaved"));
    CHECK(has(found, " layout=thd ") != is_packed);
    CHECK(has(found, "qkv/fwd bf16 bias=yes cache=yes"));
    CHECK(has(found, "linear/fwd bf16 bias=yes k=2880 m=1024 n=32") != is_packed);
  }
  CHECK(problems_of(gpt_oss, {.batch_invariant = true}).left_alone ==
        std::vector<std::string>{"experts stay vLLM's: a clamped activation, or biases"});
}

TEST_CASE("linear layers of fp8 are a part that is named") {
  const std::string blocks = R"("quantization_config": {"quant_method": "fp8",
      "weight_block_size": [128, 128]})";
  const std::string tokens = R"("quantization_config": {"quant_method": "compressed-tensors",
      "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float",
      "strategy": "channel"}, "input_activations": {"num_bits": 8, "type": "float",
      "strategy": "token", "dynamic": true}}}})";
  const std::string dynamic = R"("quantization_config": {"quant_method": "fp8",
      "activation_scheme": "dynamic"})";
  for (const auto& [fields, word] :
       {std::pair(blocks, "block"), std::pair(tokens, "token"), std::pair(dynamic, "token")}) {
    const auto found = problems_of(with(llama, fields), {.fp8_linears = true});
    CHECK(texts(found).size() == 4 * 12);
    for (const char* sizes : {" k=4096 m=1 n=6144", " k=4096 m=4096 n=4096",
                              " k=4096 m=512 n=28672", " k=14336 m=1024 n=4096"})
      CHECK(has(found, std::string("linear/fwd bf16 quantise=") + word + sizes));
    CHECK(refusal(with(llama, fields)).find("nothing to search") != std::string::npos);
  }
  CHECK(refusal(with(llama, R"("quantization_config": {"quant_method": "fp8",
      "activation_scheme": "static"})"),
                {.fp8_linears = true})
            .find("nothing to search") != std::string::npos);
}

TEST_CASE("sizes of experts are found by the names that configurations use") {
  using Case = std::pair<const char*, const char*>;  // a configuration, and the sizes
  for (const auto& [fields, sizes] :
       {Case(R"("architectures": ["Gemma4ForConditionalGeneration"], "text_config": {
            "model_type": "gemma4_text", "hidden_size": 2816, "intermediate_size": 2112,
            "moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8,
            "enable_moe_block": true, "hidden_activation": "gelu_pytorch_tanh"})",
             "act=gelu-tanh gate-up=halves routing=uniform d=2816 experts=128 h=704 m=1 top-k=8"),
        Case(R"("architectures": ["HunYuanMoEV1ForCausalLM"], "hidden_size": 4096,
            "intermediate_size": 3072, "moe_intermediate_size": [3072, 3072], "num_experts": 64,
            "moe_topk": [8, 8], "hidden_act": "silu")",
             "act=silu gate-up=halves routing=uniform d=4096 experts=64 h=3072 m=1 top-k=8"),
        Case(R"("architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_size": 2560,
            "intermediate_size": 12288, "moe_intermediate_size": 1536, "moe_num_experts": 64,
            "moe_k": 6)",
             "act=silu gate-up=halves routing=uniform d=2560 experts=64 h=1536 m=1 top-k=6"),
        Case(R"("architectures": ["DbrxForCausalLM"], "d_model": 6144, "ffn_config": {
            "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4,
            "ffn_act_fn": {"name": "silu"}})",
             "act=silu gate-up=halves routing=uniform d=6144 experts=16 h=10752 m=1 top-k=4"),
        Case(R"("architectures": ["Qwen3OmniMoeForConditionalGeneration"], "hidden_size": 7,
            "thinker_config": {"text_config": {"hidden_size": 2048, "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8}})",
             "act=silu gate-up=halves routing=uniform d=2048 experts=128 h=768 m=1 top-k=8"),
        Case(R"("architectures": ["LongcatFlashForCausalLM"], "hidden_size": 6144,
            "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "n_routed_experts": 512,
            "moe_topk": 12)",
             "act=silu gate-up=halves routing=uniform d=6144 experts=512 h=2048 m=1 top-k=12")}) {
    CAPTURE(fields);
    const auto found = problems_of("{" + std::string(fields) + "}", {.tokens = {1}});
    CHECK(texts(found) == std::vector<std::string>{std::string("moe-ffn/fwd bf16 ") + sizes});
  }
  // Experts of two kinds, as ERNIE 4.5 has for text and for vision.
  CHECK(texts(problems_of(R"({"architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
      "text_config": {"hidden_size": 2560, "moe_intermediate_size": [1536, 512], "moe_k": 6,
      "moe_num_experts": 64}})",
                          {.tokens = {1}}))
            .size() == 2);
  CHECK(refusal(R"({"architectures": ["NemotronHForCausalLM"], "hidden_size": 4096,
      "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
      "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"})")
            .find("experts stay vLLM's: the activation relu2") != std::string::npos);
  // A dense Gemma 4, and HunYuan's one expert.
  for (const char* fields : {R"("num_experts": 128, "top_k_experts": 8, "enable_moe_block": false)",
                             R"("num_experts": 1, "moe_topk": 1)", R"("num_experts": null)"})
    CHECK_FALSE(has(problems_of(with(llama, fields)), "moe-ffn"));
  CHECK(refusal(with(llama, R"("num_experts": 8)"))
            .find("num_experts_per_tok or num_experts_per_token or top_k_experts") == 0);
}

TEST_CASE("the part for text is found within a model with vision, with the root's architecture") {
  const std::string_view sizes(std::string_view(llama).substr(std::string_view(llama).find(',')));
  const std::string text = R"({"model_type": "llama")" + std::string(sizes);
  REQUIRE(text.find("architectures") == std::string::npos);
  const auto in = [&](const std::string& root) {
    return problems_of("{" + root + R"(, "text_config": )" + text + "}", {.tokens = {1}});
  };
  const auto plain = texts(problems_of(llama, {.tokens = {1}}));
  CHECK(texts(in(R"("architectures": ["LlamaForCausalLM"])")) == plain);
  // vLLM runs LLaVA's by its Llama.
  CHECK(texts(in(R"("architectures": ["LlavaForConditionalGeneration"])")) == plain);
  CHECK(refusal(R"({"architectures": ["Qwen2VLForConditionalGeneration"], "text_config":
      {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": {"mrope_section": [16, 24, 24]}}})")
            .find("angles of several kinds of positions") != std::string::npos);
}

TEST_CASE("elements are of the type that vLLM computes in") {
  for (const char* dtype : {R"("float32")", "null", R"("bfloat16")"})
    CHECK(refusal(with(llama, std::string(R"("torch_dtype": )") + dtype)).empty());
  CHECK(refusal(with(mixture, R"("dtype": "float16")"), {.layers = false}) ==
        "there is nothing to search: experts stay vLLM's: elements of float16");
  CHECK(refusal(with(mixture, R"("dtype": "float16", "text_config": {"dtype": "bfloat16"})"))
            .find("elements of float16") != std::string::npos);
}

TEST_CASE("layers of 4-bit weights are searched as the plugin runs them") {
  const auto quantised = [&](const std::string& config, const std::string& more = "") {
    return with(llama, R"("quantization_config": {)" + config + "}" + more);
  };
  const std::string gptq =
      R"("quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "desc_act": false)";
  const auto found = problems_of(quantised(gptq));
  CHECK(found.left_alone.empty());
  // Decoding runs the parts of `layer`, and other batches linear layers and networks.
  CHECK(has(found, "qkv/fwd bf16 cache=yes "));
  CHECK(has(found, "linear/fwd bf16 residual=yes weights=int4 k=4096 m=1 n=4096"));
  CHECK(has(found, "ffn/fwd bf16 act=silu residual=yes weights=int4 d=4096 h=14336 m=1"));
  CHECK(has(found, "linear/fwd bf16 weights=int4 k=4096 m=1024 n=6144"));
  CHECK(has(found, "ffn/fwd bf16 act=silu weights=int4 d=4096 h=14336 m=1024"));
  CHECK_FALSE(has(found, "n=28672"));
  for (const std::string& text : texts(found))
    CHECK((text.find(" weights=int4 ") != text.npos) ==
          !(text.starts_with("attention") || text.starts_with("rmsnorm")));
  // Linear layers alone: in float16, under tensor parallelism, in the order of activations.
  for (const auto& [config, serving] :
       {std::pair(quantised(gptq, R"(, "dtype": "float16")"), VllmServing{}),
        std::pair(quantised(gptq), VllmServing{.tensor_parallel = 2, .ranks = true}),
        std::pair(quantised(gptq + R"(, "dynamic": {"a": {"bits": 8}})"), VllmServing{}),
        std::pair(with(llama, R"("quantization_config": {"quant_method": "gptq", "bits": 4,
            "group_size": 128, "desc_act": true})"),
                  VllmServing{})}) {
    const auto linears = problems_of(config, serving);
    REQUIRE(linears.ops.size() == 1);
    CHECK(linears.ops.front().op->name() == "linear");
    CHECK(linears.left_alone.size() == 1);
    CHECK(has(linears, serving.tensor_parallel == 2 ? "n=14336" : "n=28672"));
  }
  CHECK(has(problems_of(quantised(gptq, R"(, "dtype": "float16")")), "linear/fwd fp16 "));
  CHECK(has(problems_of(quantised(
                R"("quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true)")),
            "linear/fwd bf16 weights=int4 zeros=yes k=4096 m=1024 n=6144"));
  const std::string compressed =
      R"("quant_method": "compressed-tensors", "config_groups": {"group_0":
      {"targets": ["Linear"], "weights": {"num_bits": BITS, "type": "int", "symmetric": true,
      "strategy": "channel", "group_size": null}, "input_activations": null}})";
  const auto of_bits = [&](const std::string& bits) {
    return quantised(std::string(compressed).replace(compressed.find("BITS"), 4, bits));
  };
  CHECK(has(problems_of(of_bits("4")), "linear/fwd bf16 group=row weights=int4 k=4096 m=1024"));
  // compression_config, the older name.
  auto older = of_bits("4");
  older.replace(older.find("quantization_config"), 19, "compression_config");
  CHECK(has(problems_of(older), "linear/fwd bf16 group=row weights=int4 k=4096 m=1024"));
  CHECK(refusal(of_bits("8"), {.linears = false, .int4_linears = true})
            .find("weights of 8 bits, which --parts linears turns on") != std::string::npos);
  CHECK(has(problems_of(of_bits("8")), "weights=int8 k=4096 m=1024 n=6144"));
  CHECK(refusal(of_bits("4"), {.linears = false}).find("quantised weights") != std::string::npos);
  for (const auto& [config, reason] :
       {std::pair<std::string, const char*>{
            R"("quant_method": "gptq", "bits": 4, "group_size": 128, "sym": false)",
            "zero points of gptq"},
        {R"("quant_method": "gptq", "bits": 4, "group_size": 256)", "groups of 256 inputs"},
        {R"("quant_method": "gptq", "bits": 3, "group_size": 128)", "weights of 3 bits"}})
    CHECK(refusal(quantised(config)).find(std::string("linear layers stay vLLM's: ") + reason) !=
          std::string::npos);
  // Experts of 4 bits; whole layers where all parts are there.
  const auto quantised_mixture = with(mixture, R"("quantization_config": {)" + gptq + "}");
  const auto all = problems_of(quantised_mixture);
  CHECK(all.left_alone.empty());
  CHECK(has(all,
            "moe-ffn/fwd bf16 act=silu routing=uniform weights=int4 d=2048 experts=128 h=768 "
            "m=4096 top-k=8"));
  CHECK(has(all, "moe-route/fwd bf16"));
  const auto linears = problems_of(quantised_mixture, {.packed_experts = false});
  CHECK(linears.ops.size() == 1);
  CHECK(linears.left_alone.size() == 2);
  CHECK(problems_of(quantised_mixture, {.experts = false, .layers = false, .linears = false})
            .ops.size() == 1);
  CHECK(refusal(quantised_mixture, {.batch_invariant = true}).find("batch invariance") !=
        std::string::npos);
  const auto experts =
      problems_of(with(gpt_oss, R"("quantization_config": {"quant_method": "mxfp4"})"),
                  {.tokens = {1}, .layers = false});
  CHECK(has(experts, "moe-ffn/fwd bf16 act=swiglu-oai bias=all routing=uniform weights=mxfp4 "));
  CHECK(has(experts, "moe-route/fwd bf16 order=after "));
}

TEST_CASE("layers under tensor parallelism are a part") {
  CHECK(refusal(llama, {.tensor_parallel = 2})
            .find("tensor parallelism, which needs ranks in --parts") != std::string::npos);
  CHECK(problems_of(llama, {.tensor_parallel = 2, .ranks = true}).left_alone.empty());
}

TEST_CASE("fp8 blocks of experts are found at every level, by both methods") {
  const char* const blocks[] = {
      R"({"quant_method": "fp8", "weight_block_size": [128, 128]})",
      R"({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0":
          {"weights": {"num_bits": 8, "type": "float", "strategy": "block",
          "block_structure": [128, 128]}, "input_activations": {"num_bits": 8, "type": "float",
          "strategy": "group", "group_size": 128, "dynamic": true}}}})"};
  for (const std::string own : blocks)
    for (const auto& config :
         {with(mixture, R"("quantization_config": )" + own),
          R"({"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": )" +
              with(mixture, R"("quantization_config": )" + own) + "}"})
      CHECK(has(problems_of(config, {.tokens = {1}}),
                "moe-ffn/fwd fp8 act=silu gate-up=halves routing=uniform scales=block"));
  CHECK(refusal(with(mixture, R"("quantization_config": {"quant_method": "fp8"})"))
            .find("experts stay vLLM's: weights quantised by fp8") != std::string::npos);
}

TEST_CASE("a configuration that is none names the field") {
  CHECK(refusal("[]") == "no JSON object: give the config.json of a model");
  CHECK(refusal("{}") ==
        "architectures is missing: give the config.json of a model as it is saved");
  CHECK(refusal(R"({"architectures": ["LlamaForCausalLM"]})") ==
        "hidden_size is missing: give the config.json of a language model");
  CHECK(refusal(with(llama, R"("hidden_size": "4096")")) ==
        "hidden_size: expected a whole number from 1 to 1073741824, found \"4096\"");
  CHECK(refusal(with(llama, R"("hidden_size": 2147483648)")) ==
        "hidden_size: expected a whole number from 1 to 1073741824, found 2147483648");
  CHECK(refusal(with(llama, R"("quantization_config": 4)")) ==
        "quantization_config: expected an object, found 4");
  CHECK(refusal(with(llama, R"("mlp_bias": 1)")) == "mlp_bias: expected true or false, found 1");
}

TEST_CASE("tune-vllm lists the problems, and searches them into one folder") {
  const Sandbox sandbox;
  write_text(sandbox.folder() / "config.json", R"({"architectures": ["Qwen3MoeForCausalLM"],
      "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 4,
      "num_experts_per_tok": 2, "num_attention_heads": 2, "head_dim": 16,
      "max_position_embeddings": 64})");
  const auto listed =
      sandbox.fftune("tune-vllm . --list --m 3 --tp 2 --parts experts,layers,ranks");
  CHECK(listed.code == 0);
  CHECK(testing::lines_in(listed.out) == 6);
  CHECK(listed.out.find("attention/fwd bf16 lengths=yes mask=none b=3 dim=16 heads=1 kv=64 "
                        "page=16 s=1") != std::string::npos);
  const auto searched =
      sandbox.fftune("tune-vllm . --m 3 --device cpu --budget 2s --wait 0s --max-variants 1");
  CHECK(searched.code == 0);
  for (const char* op : {"rmsnorm", "qkv", "attention", "linear", "moe-ffn"})
    CHECK(searched.out.find(std::string("/") + op + ".json") != std::string::npos);
  const auto refused = sandbox.fftune("tune-vllm no-such.json");
  CHECK(refused.code == 2);
  CHECK(refused.err ==
        "fftune: no-such.json: this path does not exist: tune-vllm takes the config.json of a "
        "model, or the folder that has it; it downloads nothing\n");
  CHECK(sandbox.fftune("tune-vllm meta-llama/Llama-3.2-1B").code == 2);
  const auto empty = sandbox.fftune("tune-vllm /usr");
  CHECK(empty.code == 2);
  CHECK(empty.err.find("fftune: /usr: the folder has no config.json") == 0);
  CHECK(sandbox.fftune("tune-vllm . --list --block-size 48").code == 2);
  CHECK(sandbox.fftune("tune-vllm . --list --parts heads").code == 2);
  CHECK(sandbox.fftune("tune-vllm . --list --m 3 --every-graph").code == 2);
}
