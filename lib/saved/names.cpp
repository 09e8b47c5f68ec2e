#include "saved/names.hpp"

#include <algorithm>
#include <charconv>

#include "saved/model_config.hpp"

namespace fftune {

namespace {

/// Llama, Mistral, Qwen2, Qwen3 and Gemma have a tensor for each; Phi-3 has gate and up in one. Phi
/// and GPT-2 have no gate.
std::vector<SavedInput> ffn_inputs() {
  const auto block_scale = [](std::string_view tensor, std::string_view block,
                              std::string_view whole) {
    return SavedInput{.tensor = tensor, .extents = {}, .names = {{{block}}, {{whole}}}};
  };
  return {
      {.tensor = "w_down",
       .extents = {"d", "h"},
       .names = {{{"mlp.down_proj.weight"}}, {{"mlp.fc2.weight"}}, {{"mlp.c_proj.weight"}}}},
      {.tensor = "w_gate",
       .extents = {"h", "d"},
       .names = {{{"mlp.gate_proj.weight"}}, {{"mlp.gate_up_proj.weight"}, SavedRows::first_half}}},
      {.tensor = "w_up",
       .extents = {"h", "d"},
       .names = {{{"mlp.up_proj.weight"}},
                 {{"mlp.gate_up_proj.weight"}, SavedRows::second_half},
                 {{"mlp.fc1.weight"}},
                 {{"mlp.c_fc.weight"}}}},
      block_scale("w_gate_scale", "mlp.gate_proj.weight_scale_inv", "mlp.gate_proj.weight_scale"),
      block_scale("w_up_scale", "mlp.up_proj.weight_scale_inv", "mlp.up_proj.weight_scale"),
      block_scale("w_down_scale", "mlp.down_proj.weight_scale_inv", "mlp.down_proj.weight_scale"),
      {.tensor = "b_up", .extents = {"h"}, .names = {}, .bias_of = "w_up"},
      {.tensor = "b_down", .extents = {"d"}, .names = {}, .bias_of = "w_down"},
      // Gemma 2 and 3 have a norm behind attention too, by the name that the others' norm
      // ahead of the network has.
      {.tensor = "w_norm",
       .extents = {"d"},
       .names = {{{"pre_feedforward_layernorm.weight"}}, {{"post_attention_layernorm.weight"}}}}};
}

/// The tensor that only experts of gpt-oss have beside their weights.
constexpr std::string_view gpt_oss_bias = "mlp.experts.gate_up_proj_bias";

/// Qwen's and DeepSeek's names, Mixtral's, and those of experts that transformers has packed.
std::vector<SavedInput> moe_inputs() {
  const auto weight = [](std::string_view tensor, std::vector<std::string_view> extents,
                         std::vector<SavedName> names) {
    return SavedInput{.tensor = tensor, .extents = std::move(extents), .names = std::move(names)};
  };
  return {weight("w_down", {"experts", "d", "h"},
                 {{{"mlp.experts.*.down_proj.weight"}},
                  {{"block_sparse_moe.experts.*.w2.weight"}},
                  {{"mlp.experts.down_proj"}}}),
          weight("w_gate", {"experts", "h", "d"},
                 {{{"mlp.experts.*.gate_proj.weight"}},
                  {{"block_sparse_moe.experts.*.w1.weight"}},
                  {{"mlp.experts.gate_up_proj"}, SavedRows::first_half}}),
          weight("w_up", {"experts", "h", "d"},
                 {{{"mlp.experts.*.up_proj.weight"}},
                  {{"block_sparse_moe.experts.*.w3.weight"}},
                  {{"mlp.experts.gate_up_proj"}, SavedRows::second_half}}),
          weight("w_gate_up", {"experts", "", "d"}, {{{"mlp.experts.gate_up_proj"}}}),
          weight("b_gate_up", {"experts", ""}, {{{gpt_oss_bias}}}),
          weight("b_gate", {"experts", "h"}, {{{gpt_oss_bias}, SavedRows::even}}),
          weight("b_up", {"experts", "h"}, {{{gpt_oss_bias}, SavedRows::odd}}),
          weight("b_down", {"experts", "d"}, {{{"mlp.experts.down_proj_bias"}}})};
}

/// Phi-3 and GPT-2 have the three in one tensor.
std::vector<SavedInput> qkv_inputs() {
  const auto part = [](std::string_view tensor, std::string_view rows, std::string_view name,
                       SavedRows which) {
    return SavedInput{
        .tensor = tensor,
        .extents = {rows, "d"},
        .names = {
            {{name}}, {{"self_attn.qkv_proj.weight"}, which}, {{"attn.c_attn.weight"}, which}}};
  };
  return {part("w_q", "heads*dim", "self_attn.q_proj.weight", SavedRows::q),
          part("w_k", "kv-heads*dim", "self_attn.k_proj.weight", SavedRows::k),
          part("w_v", "kv-heads*dim", "self_attn.v_proj.weight", SavedRows::v),
          {.tensor = "w",
           .extents = {"", "d"},
           .names = {{{"self_attn.q_proj.weight", "self_attn.k_proj.weight",
                       "self_attn.v_proj.weight"}},
                     {{"self_attn.qkv_proj.weight"}},
                     {{"attn.c_attn.weight"}}}},
          {.tensor = "bias", .extents = {""}, .names = {}, .bias_of = "w"},
          {.tensor = "b_q", .extents = {"heads*dim"}, .names = {}, .bias_of = "w_q"},
          {.tensor = "b_k", .extents = {"kv-heads*dim"}, .names = {}, .bias_of = "w_k"},
          {.tensor = "b_v", .extents = {"kv-heads*dim"}, .names = {}, .bias_of = "w_v"},
          {.tensor = "q_norm", .extents = {"dim"}, .names = {{{"self_attn.q_norm.weight"}}}},
          {.tensor = "k_norm", .extents = {"dim"}, .names = {{{"self_attn.k_norm.weight"}}}}};
}

/// The parts' names, each as its op has it, but for the norms and the biases of the whole. The
/// weights of a network and of experts have one name.
std::vector<SavedInput> layer_inputs() {
  std::vector<SavedInput> inputs = qkv_inputs();
  for (const auto& part : {ffn_inputs(), moe_inputs()})
    for (const SavedInput& input : part) {
      const auto known = std::find_if(inputs.begin(), inputs.end(), [&](const SavedInput& each) {
        return each.tensor == input.tensor;
      });
      if (known == inputs.end())
        inputs.push_back(input);
      else
        known->names.insert(known->names.end(), input.names.begin(), input.names.end());
    }
  std::erase_if(inputs, [](const SavedInput& input) {
    return input.tensor == "w_norm" || input.tensor.ends_with("_scale");
  });
  for (SavedInput& input : inputs) {
    if (input.tensor == "w") input.tensor = "w_qkv";
    if (input.tensor == "bias") input.tensor = "b_qkv", input.bias_of = "w_qkv";
  }
  const auto norm = [&](std::string_view tensor, std::vector<SavedName> names) {
    inputs.push_back({.tensor = tensor, .extents = {"d"}, .names = std::move(names)});
  };
  norm("attn_norm", {{{"input_layernorm.weight"}}, {{"ln_1.weight"}}});
  norm("attn_post_norm", {{{"post_attention_layernorm.weight"}}});
  norm("ffn_norm", {{{"pre_feedforward_layernorm.weight"}},
                    {{"post_attention_layernorm.weight"}},
                    {{"ln_2.weight"}}});
  norm("ffn_post_norm", {{{"post_feedforward_layernorm.weight"}}});
  inputs.push_back(
      {.tensor = "w_o",
       .extents = {"d", "heads*dim"},
       .names = {
           {{"self_attn.o_proj.weight"}}, {{"self_attn.dense.weight"}}, {{"attn.c_proj.weight"}}}});
  inputs.push_back({.tensor = "w_router",
                    .extents = {"experts", "d"},
                    .names = {{{"mlp.gate.weight"}}, {{"block_sparse_moe.gate.weight"}}}});
  for (const auto& [bias, weight] :
       {std::pair("b_o", "w_o"), {"attn_norm_bias", "attn_norm"}, {"ffn_norm_bias", "ffn_norm"}})
    inputs.push_back({.tensor = bias, .extents = {"d"}, .names = {}, .bias_of = weight});
  return inputs;
}

/// The norm and the product behind the last layer; without a weight of its own the product has the
/// embedding.
std::vector<SavedInput> head_inputs(std::string_view weight, std::string_view bias,
                                    std::string_view norm, std::string_view norm_bias) {
  std::vector<SavedName> names{{{"lm_head.weight"}}};
  for (const std::string_view name : embedding_names()) names.push_back({{name}});
  return {
      {.tensor = weight, .extents = {"vocab", "d"}, .names = std::move(names), .of_model = true},
      {.tensor = bias, .extents = {"vocab"}, .names = {}, .bias_of = weight},
      {.tensor = norm,
       .extents = {"d"},
       .names = {{{"norm.weight"}}, {{"final_layernorm.weight"}}, {{"ln_f.weight"}}},
       .of_model = true},
      {.tensor = norm_bias, .extents = {"d"}, .names = {}, .bias_of = norm}};
}

/// Everything that a token takes: the layers' inputs first.
std::vector<SavedInput> decode_inputs() {
  std::vector<SavedInput> inputs = layer_inputs();
  for (SavedInput& input : head_inputs("w_head", "b_head", "final_norm", "final_norm_bias"))
    inputs.push_back(std::move(input));
  std::vector<SavedName> names;
  for (const std::string_view name : embedding_names()) names.push_back({{name}});
  inputs.push_back({.tensor = "embedding",
                    .extents = {"vocab", "d"},
                    .names = std::move(names),
                    .of_model = true});
  return inputs;
}

/// `act`, `eps` and `heads`: fields that other ops have too.
SavedOp layer_op(const ConfigField& act, const std::vector<std::string_view>& eps,
                 std::vector<ConfigField> heads) {
  heads.push_back({"rotary", {config_rotary}});
  heads.push_back({"top-k", config_names::experts_per_token});
  heads.push_back({"window", {"sliding_window"}});
  return {
      .op = "layer",
      .inputs = layer_inputs(),
      .options = {{"qkv-bias", "yes", "b_q"},
                  {"qk-norm", "yes", "q_norm"},
                  {"out-bias", "yes", "b_o"},
                  {"post-norms", "yes", "ffn_post_norm"},
                  {"norm", "layer", "attn_norm_bias"},

                  {"ffn", "moe", "w_router"},
                  {"ffn", "plain", "", "mlp.fc1.weight"},
                  {"ffn", "plain", "", "mlp.c_fc.weight"},
                  {"ffn-bias", "yes", "b_down"},
                  {"gate-up", "halves", "w_gate_up"}},
      .sizes = std::move(heads),
      .settings = {act,
                   {"eps", eps},
                   {"convention", {"model_type"}},
                   {"renormalise", {"norm_topk_prob", "model_type"}, "ffn", {{"mixtral", "yes"}}},
                   {"softcap", {"attn_logit_softcapping"}},
                   {"scale", {config_scale}},
                   // It learns its positions.
                   {"rotation", {"model_type"}, {}, {{"gpt2", "none"}}},
                   {"block", {"model_type"}, {}, {{"phi", "parallel"}}},
                   {"base", {"rope_theta"}},
                   {"angles", {"rope_type", "type"}, {}, {{"linear", "base"}, {"default", "base"}}},
                   {"factor", {"factor"}, "angles"},
                   {"low", {"low_freq_factor"}, "angles"},
                   {"high", {"high_freq_factor"}, "angles"},
                   {"context", {"original_max_position_embeddings"}, "angles"}},
      .is_whole = true};
}

/// One token of the model: its layers are alike, and its embedding is a row times a factor.
SavedOp decode_op(SavedOp decode) {
  decode.op = "decode";
  decode.inputs = decode_inputs();
  decode.options.push_back({"head-bias", "yes", "b_head"});
  decode.settings.push_back({"logit-softcap", {"final_logit_softcapping"}});
  decode.settings.push_back({"embed-scale", {config_embedding}});
  decode.is_of_model = true;
  return decode;
}

}  // namespace

const std::vector<std::string_view>& embedding_names() {
  static const std::vector<std::string_view> names{"embed_tokens.weight", "wte.weight"};
  return names;
}

const std::vector<SavedOp>& saved_ops() {
  const ConfigField act{"act", config_names::activation};
  const std::vector<std::string_view> eps{"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"};
  const std::vector<ConfigField> heads{{"dim", config_names::head_features},
                                       {"heads", config_names::heads},
                                       {"kv-heads", config_names::kv_heads}};
  SavedOp layer = layer_op(act, eps, heads), decode = decode_op(layer);
  static const std::vector<SavedOp> ops{
      {.op = "ffn",
       .inputs = ffn_inputs(),
       .options = {{"gate", "no", "", "mlp.fc1.weight"},
                   {"gate", "no", "", "mlp.c_fc.weight"},
                   {"bias", "both", "b_up"},
                   {"bias", "down", "b_down"}},
       .sizes = {},
       .settings = {act, {"eps", eps, "norm"}, {"convention", {"model_type"}, "norm"}}},
      {.op = "moe-ffn",
       .inputs = moe_inputs(),
       .options = {{"gate-up", "interleaved", "", gpt_oss_bias},
                   {"gate-up", "halves", "w_gate_up"},
                   {"act", "swiglu-oai", "", gpt_oss_bias},
                   {"bias", "all", "b_gate_up"}},
       .sizes = {{"top-k", config_names::experts_per_token}},
       .settings = {act}},
      {.op = "qkv",
       .inputs = qkv_inputs(),
       .options = {{"bias", "yes", "b_q"}, {"norm", "yes", "q_norm"}},
       .sizes = heads,
       .settings = {{"eps", eps, "norm"}}},
      // The product behind attention, where nothing else is mapped.
      {.op = "linear",
       .inputs = {{.tensor = "w",
                   .extents = {"n", "k"},
                   .names = {{{"self_attn.o_proj.weight"}},
                             {{"self_attn.dense.weight"}},
                             {{"attn.c_proj.weight"}}}},
                  {.tensor = "bias", .extents = {"n"}, .names = {}, .bias_of = "w"}},
       .options = {{"bias", "yes", "bias"}},
       .sizes = {},
       .settings = {}},
      {.op = "rmsnorm",
       .inputs = {{.tensor = "w", .extents = {"d"}, .names = {{{"input_layernorm.weight"}}}}},
       .options = {},
       .sizes = {},
       .settings = {{"eps", eps}, {"convention", {"model_type"}}},
       .foreign = "input_layernorm.bias"},
      {.op = "layernorm",
       .inputs = {{.tensor = "b", .extents = {"d"}, .names = {}, .bias_of = "w"},
                  {.tensor = "w",
                   .extents = {"d"},
                   .names = {{{"input_layernorm.weight"}}, {{"ln_1.weight"}}}}},
       .options = {},
       .sizes = {},
       .settings = {{"eps", eps}}},
      std::move(layer),
      std::move(decode),
      {.op = "head",
       .inputs = head_inputs("w", "bias", "w_norm", "b_norm"),
       .options = {{"bias", "yes", "bias"}, {"norm", "layer", "b_norm"}},
       .sizes = {},
       .settings = {{"eps", eps},
                    {"convention", {"model_type"}},
                    {"softcap", {"final_logit_softcapping"}, {}, {}, "choose"}},
       .is_whole = true,
       .is_of_model = true}};
  return ops;
}

const SavedOp* find_saved_op(std::string_view op) {
  const auto& all = saved_ops();
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const SavedOp& each) { return each.op == op; });
  return found == all.end() ? nullptr : &*found;
}

const SavedInput* find_saved_input(const SavedOp& op, std::string_view tensor) {
  const auto found = std::find_if(op.inputs.begin(), op.inputs.end(),
                                  [&](const SavedInput& input) { return input.tensor == tensor; });
  return found == op.inputs.end() ? nullptr : &*found;
}

std::string_view our_word(std::string_view word) {
  if (word == "gelu_pytorch_tanh" || word == "gelu_new" || word == "gelu_fast") return "gelu-tanh";
  if (word == "swish") return "silu";
  // Gemma keeps the weights of its norms as their distance from 1; others by model_type do not.
  if (word.starts_with("gemma")) return "gemma";
  return word;
}

const std::vector<std::string_view>& layer_prefixes() {
  static const std::vector<std::string_view> prefixes{
      "model.layers.#.", "layers.#.", "transformer.h.#.", "h.#.",
      // Gemma 3 and others beside a vision model.
      "model.language_model.layers.#.", "language_model.model.layers.#."};
  return prefixes;
}

bool is_conv1d(std::string_view name) {
  return name.ends_with(".c_attn.weight") || name.ends_with(".c_proj.weight") ||
         name.ends_with(".c_fc.weight");
}

bool is_stack_of_experts(std::string_view name) {
  return name.ends_with("mlp.experts.gate_up_proj") || name.ends_with("mlp.experts.down_proj");
}

std::pair<std::string_view, std::int64_t> split_layer(std::string_view tensor) {
  constexpr std::string_view start = "layers.";
  if (!tensor.starts_with(start)) return {tensor, 0};
  std::int64_t layer = 0;
  const char* const end = tensor.data() + tensor.size();
  const auto [rest, error] = std::from_chars(tensor.data() + start.size(), end, layer);
  if (error != std::errc() || rest == end || *rest != '.') return {tensor, 0};
  return {{rest + 1, static_cast<std::size_t>(end - rest - 1)}, layer};
}

bool is_of_each_expert(SavedRows rows, std::vector<std::int64_t> whole,
                       const std::vector<std::int64_t>& part) {
  if (rows != SavedRows::first_half && rows != SavedRows::second_half && rows != SavedRows::even &&
      rows != SavedRows::odd)
    return false;
  if (whole.size() < 2 || whole[1] % 2 != 0) return false;
  whole[1] /= 2;
  return whole == part;
}

std::int64_t row_of_half(SavedRows rows, std::int64_t row, std::int64_t each) {
  if (rows == SavedRows::even || rows == SavedRows::odd)
    return 2 * row + (rows == SavedRows::odd ? 1 : 0);
  return row / each * 2 * each + row % each + (rows == SavedRows::second_half ? each : 0);
}

}  // namespace fftune
