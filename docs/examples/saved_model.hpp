// A saved model, as transformers writes it: what its layers are to the op layer, and the weights in
// the shapes that the op takes. Part of the example run_model.cpp.
#pragma once

#include "quantised_weights.hpp"

// ---- names --------------------------------------------------------------------------------------

/// Which tensor of a layer a weight of the op is.
struct Name {
  std::string saved;  // behind "model.layers.N."; '*' stands for each expert in turn
  std::vector<std::string> parts = {};  // the weights whose rows it has, one after the other
  bool transposed = false;              // [in, out]: GPT-2's Conv1D
};

/// Names of Llama, Mistral, Qwen and Gemma; Phi and Phi-3; GPT-2; Mixtral and Qwen3-MoE.
inline const std::vector<Name>& names_of(const std::string& weight) {
  const std::vector<std::string> qkv{"w_q", "w_k", "w_v"}, biases{"b_q", "b_k", "b_v"};
  const std::vector<std::string> gate_up{"w_gate", "w_up"};
  const auto projection = [&](const std::string& which) -> std::vector<Name> {
    return {{"self_attn." + which + "_proj.weight"},
            {"self_attn.qkv_proj.weight", qkv},
            {"attn.c_attn.weight", qkv, true}};
  };
  const auto bias = [&](const std::string& which) -> std::vector<Name> {
    return {{"self_attn." + which + "_proj.bias"}, {"attn.c_attn.bias", biases}};
  };
  static const std::map<std::string, std::vector<Name>> names{
      {"attn_norm", {{"input_layernorm.weight"}, {"ln_1.weight"}}},
      {"attn_norm_bias", {{"input_layernorm.bias"}, {"ln_1.bias"}}},
      {"w_q", projection("q")},
      {"w_k", projection("k")},
      {"w_v", projection("v")},
      {"b_q", bias("q")},
      {"b_k", bias("k")},
      {"b_v", bias("v")},
      {"q_norm", {{"self_attn.q_norm.weight"}}},
      {"k_norm", {{"self_attn.k_norm.weight"}}},
      {"w_o",
       {{"self_attn.o_proj.weight"}, {"self_attn.dense.weight"}, {"attn.c_proj.weight", {}, true}}},
      {"b_o", {{"self_attn.o_proj.bias"}, {"self_attn.dense.bias"}, {"attn.c_proj.bias"}}},
      // Gemma 2 and 3 have a norm behind attention by the name that others' norm in front of the
      // network has: attn_post_norm is asked for only of those.
      {"attn_post_norm", {{"post_attention_layernorm.weight"}}},
      {"ffn_norm",
       {{"pre_feedforward_layernorm.weight"},
        {"post_attention_layernorm.weight"},
        {"ln_2.weight"}}},
      {"ffn_norm_bias", {{"ln_2.bias"}}},
      {"ffn_post_norm", {{"post_feedforward_layernorm.weight"}}},
      {"w_gate",
       {{"mlp.gate_proj.weight"},
        {"mlp.gate_up_proj.weight", gate_up},
        {"mlp.experts.*.gate_proj.weight"},
        {"block_sparse_moe.experts.*.w1.weight"}}},
      {"w_up",
       {{"mlp.up_proj.weight"},
        {"mlp.gate_up_proj.weight", gate_up},
        {"mlp.experts.*.up_proj.weight"},
        {"block_sparse_moe.experts.*.w3.weight"},
        {"mlp.fc1.weight"},
        {"mlp.c_fc.weight", {}, true}}},
      {"w_gate_up", {{"mlp.experts.gate_up_proj"}}},
      {"w_down",
       {{"mlp.down_proj.weight"},
        {"mlp.experts.*.down_proj.weight"},
        {"block_sparse_moe.experts.*.w2.weight"},
        {"mlp.experts.down_proj"},
        {"mlp.fc2.weight"},
        {"mlp.c_proj.weight", {}, true}}},
      {"b_up", {{"mlp.fc1.bias"}, {"mlp.c_fc.bias"}}},
      {"b_down", {{"mlp.down_proj.bias"}, {"mlp.fc2.bias"}, {"mlp.c_proj.bias"}}},
      {"w_router", {{"mlp.gate.weight"}, {"block_sparse_moe.gate.weight"}}}};
  const auto entry = names.find(weight);
  if (entry == names.end()) fail("the layers have an input " + weight);
  return entry->second;
}

/// The modules whose rows a packed weight of the op has, one after the other; empty for others.
inline const std::vector<std::string>& modules_of(std::string_view weight) {
  static const std::map<std::string, std::vector<std::string>> modules{
      {"w_qkv", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}},
      {"w_o", {"self_attn.o_proj"}},
      {"w_gate", {"mlp.gate_proj"}},
      {"w_up", {"mlp.up_proj"}},
      {"w_down", {"mlp.down_proj"}}};
  static const std::vector<std::string> none;
  std::string name(weight);
  for (const char* part : {"_scale", "_zero"})
    if (name.ends_with(part)) name.resize(name.size() - std::string(part).size());
  const auto entry = modules.find(name);
  return entry == modules.end() ? none : entry->second;
}

// ---- the configuration --------------------------------------------------------------------------

/// The configuration with what transformers takes for keys that it does not have. A key with which
/// transformers computes what the ops do not is refused.
inline json completed(const std::string& type, const json& config) {
  const json silu{{"hidden_act", "silu"}, {"rms_norm_eps", 1e-6}, {"rope_theta", 10000.0}};
  const json gemma{{"head_dim", 256}, {"rms_norm_eps", 1e-6}, {"rope_theta", 10000.0}};
  const auto with = [](json base, const json& more) {
    base.update(more);
    return base;
  };
  const json qwen = with(silu, {{"num_key_value_heads", 32},
                                {"sliding_window", 4096},
                                {"use_sliding_window", false},
                                {"max_window_layers", 28}});
  const json gemma2 = with(gemma, {{"hidden_activation", "gelu_pytorch_tanh"},
                                   {"num_key_value_heads", 4},
                                   {"sliding_window", 4096},
                                   {"query_pre_attn_scalar", 256}});
  const std::map<std::string, json> defaults{
      {"llama", silu},
      {"mistral", with(silu, {{"num_key_value_heads", 8}, {"sliding_window", 4096}})},
      {"qwen2", qwen},
      {"qwen3", with(qwen, {{"head_dim", 128}})},
      {"qwen3_moe",
       with(qwen,
            {{"num_key_value_heads", 4}, {"num_experts_per_tok", 8}, {"norm_topk_prob", false}})},
      {"mixtral", with(silu, {{"num_key_value_heads", 8},
                              {"rms_norm_eps", 1e-5},
                              {"rope_theta", 1e6},
                              {"num_experts_per_tok", 2}})},
      {"gemma", with(gemma, {{"hidden_act", "gelu_pytorch_tanh"}, {"num_key_value_heads", 16}})},
      {"gemma2",
       with(gemma2, {{"attn_logit_softcapping", 50.0}, {"final_logit_softcapping", 30.0}})},
      {"gemma3_text", with(gemma2, {{"rope_theta", 1e6}, {"rope_local_base_freq", 10000.0}})},
      {"phi", json{{"hidden_act", "gelu_new"},
                   {"layer_norm_eps", 1e-5},
                   {"rope_theta", 10000.0},
                   {"partial_rotary_factor", 0.5}}},
      {"phi3", with(silu, {{"rms_norm_eps", 1e-5}})},
      {"gpt2", json{{"activation_function", "gelu_new"}, {"layer_norm_epsilon", 1e-5}}}};
  const auto entry = defaults.find(type);
  if (entry == defaults.end()) {
    std::string all;
    for (const auto& [name, keys] : defaults) all += (all.empty() ? "" : ", ") + name;
    fail("model_type " + type + " is not one of " + all);
  }
  json own = with(entry->second, config);
  for (const auto& [key, neutral] : {std::pair<const char*, json>{"is_causal", true},
                                     {"use_bidirectional_attention", false},
                                     {"attention_chunk_size", nullptr},
                                     {"per_layer_config", nullptr},
                                     {"qk_layernorm", false},
                                     {"add_cross_attention", false},
                                     {"scale_attn_by_inverse_layer_idx", false},
                                     {"mlp_bias", false}})
    if (const json value = own.value(key, json(nullptr)); !value.is_null() && value != neutral)
      fail(std::string("config.json has ") + key + " " + value.dump() +
           ", which this example does not compute");
  // The first checkpoints of Gemma say so, and mean the other.
  if (type == "gemma" && own.at("hidden_act") == "gelu") own["hidden_act"] = "gelu_pytorch_tanh";
  own.erase(type == "gemma2" || type == "gemma3_text" ? "hidden_act" : "hidden_activation");
  if (type == "gpt2") own.erase("hidden_act");
  // It has the key, and computes without it.
  if (type == "gemma3_text") own.erase("attn_logit_softcapping");
  return own;
}

// ---- the model ----------------------------------------------------------------------------------

class SavedModel {
 public:
  explicit SavedModel(const std::filesystem::path& folder)
      : files_(folder), config_(read_json(folder / "config.json")), quantised_(files_, config_) {
    type_ = config_.value("model_type", "");
    config_ = completed(type_, config_);
    is_gpt2_ = type_ == "gpt2";
    // Without its head a model has no prefix.
    const std::string start = is_gpt2_ ? "transformer." : "model.";
    prefix_ = files_.find(start + embedding_name()) ? start : "";
    dtype_ = dtype_of(files_.at(prefix_ + embedding_name()).dtype);
  }

  const Dtype& dtype() const { return dtype_; }
  std::int64_t features() const { return number({"hidden_size", "n_embd"}); }
  std::int64_t vocabulary() const { return number({"vocab_size"}); }
  std::int64_t layers() const { return number({"num_hidden_layers", "n_layer"}); }
  /// Soft-cap of the logits; 0: none.
  double softcap() const { return value({"final_logit_softcapping"}, 0); }

  /// A layer as a problem of the op, but for what a run decides: batch, s, cache, layers.
  json layer(std::int64_t index) const {
    const auto has = [&](const char* weight) { return source(index, weight) != nullptr; };
    const auto yes = [&](const char* weight) { return has(weight) ? "yes" : "no"; };
    const std::int64_t d = features(), heads = number({"num_attention_heads", "n_head"});
    const std::int64_t dim = value({"head_dim"}, d / heads);
    const bool experts = has("w_router"), post_norms = has("ffn_post_norm");
    json problem{{"op", "layer"},
                 {"dtype", dtype_.name},
                 {"d", d},
                 {"h", experts ? number({"moe_intermediate_size", "intermediate_size"})
                               : value({"intermediate_size", "n_inner"}, 4 * d)},
                 {"heads", heads},
                 {"kv-heads", value({"num_key_value_heads"}, heads)},
                 {"dim", dim},
                 {"act", activation()},
                 {"eps", eps()},
                 {"qkv-bias", yes("b_q")},
                 {"qk-norm", yes("q_norm")},
                 {"out-bias", yes("b_o")},
                 {"ffn-bias", yes("b_down")},
                 {"post-norms", post_norms ? "yes" : "no"},
                 {"block", type_ == "phi" ? "parallel" : "serial"}};
    if (has("attn_norm_bias"))
      problem["norm"] = "layer";
    else
      problem["convention"] = convention();
    if (experts) {
      problem["ffn"] = "moe";
      problem["experts"] = number({"num_local_experts", "num_experts"});
      problem["top-k"] = number({"num_experts_per_tok"});
      problem["renormalise"] =
          type_ == "mixtral" || value({"norm_topk_prob"}, false) ? "yes" : "no";
      problem["gate-up"] = has("w_gate_up") ? "halves" : "separate";
    } else {
      problem["ffn"] = type_ == "phi" || is_gpt2_ ? "plain" : "gated";
    }
    if (slides(index)) problem["window"] = number({"sliding_window"});
    if (const double cap = value({"attn_logit_softcapping"}, 0.0); cap > 0)
      problem["softcap"] = json(cap).dump();
    if (const double scalar = value({"query_pre_attn_scalar"}, 0.0); scalar > 0)
      problem["scale"] = json(1 / std::sqrt(scalar)).dump();
    if (!value({"scale_attn_weights"}, true)) problem["scale"] = "1";
    if (const auto [format, group, zeros] = packed_format(index); !group.empty()) {
      problem["weights"] = format;
      problem["group"] = group;
      problem["zeros"] = zeros ? "yes" : "no";
    }
    add_angles(index, dim, problem);
    return problem;
  }

  /// A weight of a layer in the shape that the op takes; `shapes` has all of the layer's shapes,
  /// checked by expect_same().
  Bytes weight(std::int64_t index, const std::string& name,
               const std::map<std::string, Shape>& shapes) const {
    if (is_packed(index, name)) return packed_weight(index, name);
    if (name == "b_qkv") {
      Bytes all;
      for (const char* part : {"b_q", "b_k", "b_v"}) {
        const std::string saved = start_of(index) + source(index, part)->saved;
        const Bytes own = rows(saved, {}, part, files_.at(saved).shape, {});
        all.insert(all.end(), own.begin(), own.end());
      }
      return all;
    }
    const Name& own = *source(index, name);
    const Shape& shape = shapes.at(name);
    if (own.saved.find('*') == std::string::npos)
      return rows(start_of(index) + own.saved, own, name, shape, shapes);
    Bytes all;
    for (std::int64_t expert = 0; expert < shape.at(0); ++expert) {
      const Bytes one = rows(start_of(index) + of_expert(own.saved, expert), own, name,
                             {shape.begin() + 1, shape.end()}, shapes);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }

  /// That a layer has the weights of these names, and no others: those would be left out silently.
  void expect_same(std::int64_t index, const std::map<std::string, Shape>& shapes) const {
    std::set<std::string> used;
    const auto use_codes = [&](const std::string& module) {
      for (const std::string& tensor : quantised_.tensors()) used.insert(module + "." + tensor);
    };
    for (const auto& [name, shape] : shapes) {
      if (is_packed(index, name)) {
        for (const std::string& module : modules_of(name)) use_codes(module);
        continue;
      }
      if (name == "b_qkv") {
        for (const char* part : {"b_q", "b_k", "b_v"}) used.insert(source(index, part)->saved);
        continue;
      }
      const Name* const own = source(index, name);
      if (own == nullptr)
        fail("the model has no tensor " + start_of(index) + names_of(name).front().saved);
      for (std::int64_t expert = 0; expert < shape.at(0); ++expert)
        used.insert(of_expert(own->saved, expert));
      if (own->saved.ends_with(".weight"))
        for (std::int64_t expert = 0; expert < shape.at(0); ++expert)
          use_codes(module_of(of_expert(own->saved, expert)));
    }
    const std::string start = start_of(index);
    for (auto entry = files_.all().lower_bound(start);
         entry != files_.all().end() && entry->first.starts_with(start); ++entry) {
      const std::string name = entry->first.substr(start.size());
      // Constants that older versions saved too.
      const bool constant = name == "attn.bias" || name == "attn.masked_bias" ||
                            name == "self_attn.rotary_emb.inv_freq";
      // GPTQ's older files have a bias of zeros for each layer.
      if (!constant && !used.contains(name) && !(name.ends_with(".bias") && is_zero(entry->second)))
        fail(entry->first + " is not of a layer that is known");
    }
  }

  /// Adds a token's input to the first layer.
  void add_embedding(std::int64_t id, std::int64_t position, Bytes& bytes) const {
    if (id < 0 || id >= vocabulary()) fail("there is no id " + std::to_string(id));
    const auto row = [&](const std::string& name, std::int64_t at) {
      const Tensor& table = files_.at(prefix_ + name);
      if (at >= table.shape.at(0)) fail("there is no position " + std::to_string(at));
      const std::size_t row_bytes = static_cast<std::size_t>(features()) * dtype_.bytes;
      return table.read(static_cast<std::size_t>(at) * row_bytes, row_bytes);
    };
    const Bytes own = row(embedding_name(), id);
    const Bytes place = is_gpt2_ ? row("wpe.weight", position) : Bytes();
    const std::size_t begin = bytes.size();
    bytes.insert(bytes.end(), own.begin(), own.end());
    const bool is_gemma = convention() == "gemma";
    if (place.empty() && !is_gemma) return;
    const auto count = static_cast<std::size_t>(features());
    const float factor = is_gemma ? embedding_factor() : 1;
    const auto row_of = numbers_of(dtype_, own.data(), count);
    const auto more =
        place.empty() ? std::vector<float>(count) : numbers_of(dtype_, place.data(), count);
    for (std::size_t i = 0; i < count; ++i)
      write_number(dtype_, row_of[i] * factor + more[i], &bytes[begin + i * dtype_.bytes]);
  }

  /// A whole token as a problem of the op decode, but for what a run decides: batch, cache. Null
  /// where layers differ, or where the embedding is more than a factor and a row.
  json token() const {
    json problem = layer(0);
    for (std::int64_t index = 1; index < layers(); ++index)
      if (layer(index) != problem) return nullptr;
    if (is_gpt2_) return nullptr;
    problem.update({{"op", "decode"}, {"layers", layers()}, {"vocab", vocabulary()}});
    if (files_.find("lm_head.bias")) problem["head-bias"] = "yes";
    if (softcap() > 0) problem["logit-softcap"] = json(softcap()).dump();
    if (convention() == "gemma") problem["embed-scale"] = json(embedding_factor()).dump();
    return problem;
  }
  std::string embedding_tensor() const { return prefix_ + embedding_name(); }

  /// The head for one token: its id, or its logits without the soft cap.
  json head(bool logits) const {
    json problem{{"op", "head"},
                 {"dtype", dtype_.name},
                 {"m", 1},
                 {"d", features()},
                 {"vocab", vocabulary()},
                 {"eps", eps()},
                 {"bias", files_.find("lm_head.bias") ? "yes" : "no"}};
    if (files_.find(tensor_of("b_norm")))
      problem["norm"] = "layer";
    else
      problem["convention"] = convention();
    if (logits)
      problem["choose"] = "none";
    else if (softcap() > 0)
      problem["softcap"] = json(softcap()).dump();
    return problem;
  }
  /// The saved name of a weight of the head: "w_norm", "b_norm", "w" or "bias".
  std::string tensor_of(const std::string& buffer) const {
    const std::string kind = buffer.starts_with('w') ? ".weight" : ".bias";
    if (buffer.ends_with("_norm")) {
      const std::string name = is_gpt2_ ? "ln_f" : type_ == "phi" ? "final_layernorm" : "norm";
      return prefix_ + name + kind;
    }
    const bool tied = buffer == "w" && files_.find("lm_head.weight") == nullptr;
    return tied ? prefix_ + embedding_name() : "lm_head" + kind;
  }
  Bytes tensor(const std::string& name, const Shape& shape) const {
    return rows(name, {}, "", shape, {});
  }

 private:
  /// Gemma's factor, which is rounded to the type of the weights.
  float embedding_factor() const {
    char rounded[4];
    write_number(dtype_, std::sqrt(static_cast<float>(features())), rounded);
    return numbers_of(dtype_, rounded, 1)[0];
  }
  /// The first of these that the configuration has.
  const json* find(std::initializer_list<const char*> keys) const {
    for (const char* key : keys)
      if (const auto entry = config_.find(key); entry != config_.end() && !entry->is_null())
        return &*entry;
    return nullptr;
  }
  template <typename T>
  T value(std::initializer_list<const char*> keys, T otherwise) const {
    const json* const found = find(keys);
    return found ? found->get<T>() : otherwise;
  }
  std::int64_t number(std::initializer_list<const char*> keys) const {
    const json* const found = find(keys);
    if (!found) fail(std::string("config.json has no ") + *keys.begin());
    return found->get<std::int64_t>();
  }

  std::string embedding_name() const { return is_gpt2_ ? "wte.weight" : "embed_tokens.weight"; }
  std::string start_of(std::int64_t layer) const {
    return prefix_ + (is_gpt2_ ? "h." : "layers.") + std::to_string(layer) + ".";
  }
  static std::string of_expert(std::string name, std::int64_t expert) {
    const auto star = name.find('*');
    return star == name.npos ? name : name.replace(star, 1, std::to_string(expert));
  }

  /// Where a weight of the layer is; null if nowhere.
  const Name* source(std::int64_t index, const std::string& weight) const {
    for (const Name& name : names_of(weight)) {
      const std::string saved = start_of(index) + of_expert(name.saved, 0);
      if (files_.find(saved) || has_codes(saved)) return &name;
    }
    return nullptr;
  }

  /// "mlp.up_proj" of "mlp.up_proj.weight".
  static std::string module_of(const std::string& saved) {
    return saved.substr(0, saved.rfind('.'));
  }
  bool has_codes(const std::string& saved) const {
    return saved.ends_with(".weight") && quantised_.has(module_of(saved));
  }
  static bool is_zero(const Tensor& tensor) {
    for (const char byte : tensor.read(0, tensor.bytes))
      if (byte != 0) return false;
    return true;
  }

  struct PackedFormat {
    std::string weights, group;
    bool zeros = false;
  };
  /// The format of the layer's packed weights; no groups where a weight has no codes, or another
  /// format than the others: the layer is dense then.
  PackedFormat packed_format(std::int64_t index) const {
    const auto known = formats_.find(index);
    if (known != formats_.end()) return known->second;
    PackedFormat& format = formats_[index];
    std::set<std::pair<std::string, std::string>> words;
    for (const char* weight : {"w_qkv", "w_o", "w_gate", "w_up", "w_down"})
      for (const std::string& module : modules_of(weight)) {
        const std::string name = start_of(index) + module;
        if (!quantised_.has(name)) return format;
        const Codes codes = quantised_.codes(name, false);
        format.zeros = format.zeros || !codes.zero.empty();
        words.emplace(codes.format, codes.word());
      }
    if (words.size() == 1) std::tie(format.weights, format.group) = *words.begin();
    return format;
  }
  bool is_packed(std::int64_t index, const std::string& weight) const {
    return !modules_of(weight).empty() && !packed_format(index).group.empty();
  }
  /// A packed weight, its scales or its zero points: the last weight is kept for those.
  Bytes packed_weight(std::int64_t index, const std::string& name) const {
    const std::vector<std::string>& modules = modules_of(name);
    const std::string key = start_of(index) + modules.front();
    if (key != packed_key_) {
      const auto [format, group, zeros] = packed_format(index);
      std::vector<Codes> parts;
      for (const std::string& module : modules)
        parts.push_back(quantised_.codes(start_of(index) + module));
      packed_ = pack(parts, group, zeros, dtype_);
      packed_key_ = key;
    }
    return name.ends_with("_scale")  ? packed_.scale
           : name.ends_with("_zero") ? packed_.zero
                                     : packed_.w;
  }

  std::string activation() const {
    const std::string name =
        value<std::string>({"hidden_activation", "hidden_act", "activation_function"}, "silu");
    if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast")
      return "gelu-tanh";
    if (name == "silu" || name == "swish") return "silu";
    if (name != "gelu" && name != "relu")
      fail("config.json has the activation " + name + ", which this example does not know");
    return name;
  }
  std::string eps() const {
    return find({"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"})->dump();
  }
  std::string convention() const { return type_.starts_with("gemma") ? "gemma" : "llama"; }

  /// Whether a query of the layer sees the nearest keys alone.
  bool slides(std::int64_t index) const {
    if (!find({"sliding_window"}) || !value({"use_sliding_window"}, true)) return false;
    if (type_ == "llama" || type_ == "gemma" || type_ == "phi" || is_gpt2_) return false;
    const bool all =
        type_ == "mistral" || type_ == "mixtral" || type_ == "phi3" || type_ == "qwen3_moe";
    if (all) return true;
    if (const json* const types = find({"layer_types"})) {
      const json& own = types->at(static_cast<std::size_t>(index));
      if (own != "sliding_attention" && own != "full_attention")
        fail("config.json has layer_types of " + own.dump() + ", which this example does not know");
      return own == "sliding_attention";
    }
    if (type_ == "gemma2") return index % 2 == 0;
    if (type_ == "gemma3_text")
      return (index + 1) % value<std::int64_t>({"sliding_window_pattern"}, 6) != 0;
    return index >= value<std::int64_t>({"max_window_layers"}, 28);
  }

  /// Older configurations have rope_theta beside rope_scaling, newer ones both in rope_parameters,
  /// for each type of layer where they differ.
  void add_angles(std::int64_t index, std::int64_t dim, json& problem) const {
    if (is_gpt2_) {
      problem["rotation"] = "none";
      return;
    }
    json rope = json::object();
    for (const char* key : {"rope_parameters", "rope_scaling"})
      if (const json* const found = find({key}); found && !found->empty()) rope = *found;
    const char* const type = slides(index) ? "sliding_attention" : "full_attention";
    if (rope.contains(type))
      rope = rope.at(type);
    else if (slides(index) && find({"rope_local_base_freq"}))
      rope = {{"rope_theta", *find({"rope_local_base_freq"})}};
    const auto get = [&](const char* key, const json& otherwise) {
      return rope.contains(key) ? rope.at(key) : value<json>({key}, otherwise);
    };
    problem["base"] = get("rope_theta", 10000.0).dump();
    const double share = get("partial_rotary_factor", 1.0);
    if (share < 1) problem["rotary"] = static_cast<std::int64_t>(static_cast<double>(dim) * share);
    const std::string kind = rope.value("rope_type", rope.value("type", "default"));
    if (kind == "llama3") {
      problem["angles"] = kind;
      for (const auto& [ours, theirs] : {std::pair{"factor", "factor"},
                                         {"low", "low_freq_factor"},
                                         {"high", "high_freq_factor"},
                                         {"context", "original_max_position_embeddings"}})
        problem[ours] = rope.at(theirs).dump();
    } else if (kind == "linear") {
      problem["factor"] = rope.at("factor").dump();
    } else if (kind != "default") {
      fail("rope_type " + kind + " is not one that this example knows");
    }
  }

  /// The rows of a saved tensor that are the weight `name`.
  Bytes rows(const std::string& saved, const Name& of, const std::string& name, const Shape& shape,
             const std::map<std::string, Shape>& shapes) const {
    Shape whole = shape;
    std::int64_t first = 0;
    if (!of.parts.empty()) {
      whole[0] = 0;
      for (const std::string& part : of.parts) {
        if (part == name) first = whole[0];
        whole[0] += shapes.at(part).at(0);
      }
    }
    if (has_codes(saved)) return dense_rows(saved, whole, first, shape[0]);
    const Tensor& tensor = files_.at(saved);
    Shape expected = whole;
    if (of.transposed) std::reverse(expected.begin(), expected.end());
    if (tensor.shape != expected || tensor.dtype != dtype_.saved)
      fail(saved + " is " + tensor.dtype + " " + json(tensor.shape).dump() + " instead of " +
           dtype_.saved + " " + json(expected).dump());
    const std::size_t row = tensor.bytes / static_cast<std::size_t>(whole[0]);
    const std::size_t begin = static_cast<std::size_t>(first) * row;
    const std::size_t size = static_cast<std::size_t>(shape[0]) * row;
    if (!of.transposed) return tensor.read(begin, size);
    const Bytes all = tensor.read(0, tensor.bytes);
    Bytes turned(size);
    const std::size_t element = dtype_.bytes, height = static_cast<std::size_t>(whole[0]);
    for (std::size_t at = 0; at < size; at += element) {
      const std::size_t from = (begin + at) / row, column = at % row / element;
      std::memcpy(&turned[at], all.data() + (column * height + from) * element, element);
    }
    return turned;
  }

  /// Rows of a weight with codes, as numbers.
  Bytes dense_rows(const std::string& saved, const Shape& whole, std::int64_t first,
                   std::int64_t count) const {
    const Codes codes = quantised_.codes(module_of(saved));
    if (whole != Shape{codes.n, codes.k})
      fail(saved + " is " + json(Shape{codes.n, codes.k}).dump() + " instead of " +
           json(whole).dump());
    Bytes dense(static_cast<std::size_t>(count * codes.k) * dtype_.bytes);
    for (std::int64_t row = 0; row < count; ++row)
      for (std::int64_t i = 0; i < codes.k; ++i)
        write_number(dtype_, codes.at(first + row, i),
                     &dense[static_cast<std::size_t>(row * codes.k + i) * dtype_.bytes]);
    return dense;
  }

  Files files_;
  json config_;
  QuantisedWeights quantised_;
  mutable std::map<std::int64_t, PackedFormat> formats_;  // of layers
  mutable std::string packed_key_;
  mutable Packed packed_;
  std::string type_, prefix_;
  Dtype dtype_;
  bool is_gpt2_ = false;
};
