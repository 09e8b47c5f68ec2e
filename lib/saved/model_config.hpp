// config.json of a saved model: where it has the facts of its language model, and by which names.
#pragma once

#include <string_view>
#include <vector>

namespace fftune {

struct JsonValue;

/// The objects that describe the language model: the root, and in a model with vision or sound the
/// part for text within it, from the outermost in. An inner one counts before an outer one.
std::vector<const JsonValue*> language_configs(const JsonValue& root);

/// The member of that name that is not null, of the innermost of language_configs() that has it; a
/// dot leads into an object: "ffn_config.moe_top_k". Null if there is none.
const JsonValue* find_in(const std::vector<const JsonValue*>& configs, std::string_view name);

/// How the weights are quantised: quantization_config, or compression_config in older models, of
/// the outermost of language_configs() that has one; null if none has.
const JsonValue* quantisation_config(const JsonValue& root);

/// The names that configurations of transformers and vLLM have for one fact; the first that a
/// configuration has counts.
namespace config_names {

using Names = std::vector<std::string_view>;

inline const Names features{"hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim"};
inline const Names heads{"num_attention_heads", "n_head", "n_heads", "num_heads"};
inline const Names kv_heads{"num_key_value_heads",   "n_head_kv",
                            "num_kv_heads",          "num_attention_groups",
                            "multi_query_group_num", "attn_config.kv_n_heads"};
inline const Names head_features{"head_dim", "kv_channels", "attention_head_dim"};
/// Between the products of a dense network.
inline const Names network_features{"intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"};
inline const Names positions{"max_position_embeddings", "n_positions", "max_seq_len",
                             "context_length",          "seq_length",  "model_max_length"};
inline const Names window{"sliding_window", "sliding_window_size", "attention_window_size"};
inline const Names activation{"hidden_activation",   "hidden_act", "mlp_hidden_act",
                              "activation_function", "activation", "ffn_config.ffn_act_fn.name"};

inline const Names experts{"num_experts", "num_local_experts", "n_routed_experts",
                           "moe_num_experts", "ffn_config.moe_num_experts"};
inline const Names experts_per_token{"num_experts_per_tok", "num_experts_per_token",
                                     "top_k_experts",       "moe_topk",
                                     "moe_top_k",           "moe_k",
                                     "ffn_config.moe_top_k"};
/// Into an expert, where they are not the model's.
inline const Names expert_inputs{"moe_latent_size", "moe_hidden_size"};
/// Between the products of an expert; `network_features` where there is none of these.
inline const Names expert_features{"moe_intermediate_size", "expert_ffn_hidden_size",
                                   "expert_hidden_dim", "ffn_config.ffn_hidden_size"};
/// Whether the chosen experts' weights are divided by their sum.
inline const Names renormalises{"norm_topk_prob", "moe_renormalize", "norm_expert_weight",
                                "route_norm"};

}  // namespace config_names

}  // namespace fftune
