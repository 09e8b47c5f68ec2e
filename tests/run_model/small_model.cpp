#include "small_model.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "core/hash.hpp"
#include "support/safetensors.hpp"

namespace fftune::testing {
namespace {

constexpr double eps = 1e-5;
constexpr double factor = 8, low = 1, high = 4, context = 64;

double silu(double x) {
  return x / (1 + std::exp(-x));
}

std::string start_of(int layer) {
  return "model.layers." + std::to_string(layer) + ".";
}

}  // namespace

SmallModel::SmallModel(const ModelShape& shape) : shape_(shape) {
  const auto& s = shape_;
  const auto square_root = [](int count) { return 1 / std::sqrt(static_cast<double>(count)); };
  add("model.embed_tokens.weight", {s.vocabulary, s.d}, 1);
  for (int layer = 0; layer < s.layers; ++layer) {
    const std::string start = start_of(layer);
    add(start + "input_layernorm.weight", {s.d}, 0.2, 1);
    add(start + "post_attention_layernorm.weight", {s.d}, 0.2, 1);
    add(start + "self_attn.q_proj.weight", {s.heads * s.dim, s.d}, 2 * square_root(s.d));
    add(start + "self_attn.k_proj.weight", {s.kv_heads * s.dim, s.d}, 2 * square_root(s.d));
    add(start + "self_attn.v_proj.weight", {s.kv_heads * s.dim, s.d}, square_root(s.d));
    add(start + "self_attn.o_proj.weight", {s.d, s.heads * s.dim}, square_root(s.heads * s.dim));
    if (s.qkv_bias) {
      add(start + "self_attn.q_proj.bias", {s.heads * s.dim}, 1);
      add(start + "self_attn.k_proj.bias", {s.kv_heads * s.dim}, 1);
      add(start + "self_attn.v_proj.bias", {s.kv_heads * s.dim}, 0.5);
    }
    if (s.qk_norm) {
      add(start + "self_attn.q_norm.weight", {s.dim}, 0.2, 1.5);
      add(start + "self_attn.k_norm.weight", {s.dim}, 0.2, 1.5);
    }
    add(start + "mlp.gate_proj.weight", {s.h, s.d}, square_root(s.d));
    add(start + "mlp.up_proj.weight", {s.h, s.d}, square_root(s.d));
    add(start + "mlp.down_proj.weight", {s.d, s.h}, 2 * square_root(s.h));
  }
  add("model.norm.weight", {s.d}, 0.2, 1);
  if (!s.tied) add("lm_head.weight", {s.vocabulary, s.d}, square_root(s.d));
}

void SmallModel::add(const std::string& name, const std::vector<std::int64_t>& shape,
                     double deviation, double mean) {
  std::mt19937 random(static_cast<unsigned>(fnv1a(name)));
  std::normal_distribution<double> normal(mean, deviation);
  Weight& weight = weights_[name];
  weight.shape = shape;
  std::size_t count = 1;
  for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
  for (std::size_t i = 0; i < count; ++i)
    weight.values.push_back(static_cast<float>(normal(random)));
}

void SmallModel::write(const std::filesystem::path& folder, int shards,
                       const std::string& dtype) const {
  const auto& s = shape_;
  nlohmann::json config{{"model_type", s.qk_norm      ? "qwen3"
                                       : s.qkv_bias   ? "qwen2"
                                       : s.window > 0 ? "mistral"
                                                      : "llama"},
                        {"hidden_size", s.d},
                        {"intermediate_size", s.h},
                        {"num_attention_heads", s.heads},
                        {"num_key_value_heads", s.kv_heads},
                        {"head_dim", s.dim},
                        {"num_hidden_layers", s.layers},
                        {"vocab_size", s.vocabulary},
                        {"hidden_act", "silu"},
                        {"rms_norm_eps", eps},
                        {"rope_theta", s.base},
                        {"tie_word_embeddings", s.tied}};
  if (s.window > 0) config["sliding_window"] = s.window;
  if (s.llama3)
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", factor},
                              {"low_freq_factor", low},
                              {"high_freq_factor", high},
                              {"original_max_position_embeddings", context}};
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json") << config;

  std::vector<SafetensorsWriter> writers(static_cast<std::size_t>(shards));
  nlohmann::json map;
  const auto file = [&](std::size_t shard) {
    return shards == 1 ? std::string("model.safetensors")
                       : "model-" + std::to_string(shard) + ".safetensors";
  };
  std::size_t next = 0;
  for (const auto& [name, weight] : weights_) {
    const std::size_t shard = next++ % writers.size();
    writers[shard].add(name, dtype, weight.shape, weight.values);
    map[name] = file(shard);
  }
  for (std::size_t shard = 0; shard < writers.size(); ++shard)
    writers[shard].write(folder / file(shard));
  if (shards > 1)
    std::ofstream(folder / "model.safetensors.index.json") << nlohmann::json{{"weight_map", map}};
}

std::vector<double> SmallModel::product(const std::vector<double>& x,
                                        const std::string& name) const {
  const Weight& weight = weights_.at(name + ".weight");
  const auto bias = weights_.find(name + ".bias");
  std::vector<double> y(static_cast<std::size_t>(weight.shape[0]));
  for (std::size_t i = 0; i < y.size(); ++i) {
    if (bias != weights_.end()) y[i] = bias->second.values[i];
    for (std::size_t k = 0; k < x.size(); ++k)
      y[i] += x[k] * double{weight.values[i * x.size() + k]};
  }
  return y;
}

std::vector<double> SmallModel::norm(const std::vector<double>& x, const std::string& name) const {
  const auto& weight = weights_.at(name + ".weight").values;
  double square = 0;
  for (const double value : x) square += value * value;
  const double scale = 1 / std::sqrt(square / static_cast<double>(x.size()) + eps);
  std::vector<double> y(x);
  for (std::size_t i = 0; i < y.size(); ++i) y[i] *= scale * double{weight[i]};
  return y;
}

void SmallModel::rotate(std::vector<double>& head, int position) const {
  const std::size_t half = head.size() / 2;
  for (std::size_t i = 0; i < half; ++i) {
    double frequency = std::pow(shape_.base, -static_cast<double>(i) / static_cast<double>(half));
    if (shape_.llama3) {
      // Llama 3.1: long waves are stretched by the factor, those between by a part of it.
      const double turns = context * frequency / (2 * M_PI);
      const double share = std::clamp((turns - low) / (high - low), 0.0, 1.0);
      frequency *= share + (1 - share) / factor;
    }
    const double angle = position * frequency;
    const double a = head[i], b = head[i + half];
    head[i] = a * std::cos(angle) - b * std::sin(angle);
    head[i + half] = b * std::cos(angle) + a * std::sin(angle);
  }
}

/// Heads of q, k or v; those of q and k are rotated.
std::vector<double> SmallModel::heads_of(const std::vector<double>& x, const std::string& start,
                                         const std::string& which, int position) const {
  auto all = product(x, start + "self_attn." + which + "_proj");
  if (which == "v") return all;
  const auto dim = static_cast<std::ptrdiff_t>(shape_.dim);
  for (auto first = all.begin(); first != all.end(); first += dim) {
    std::vector<double> head(first, first + dim);
    if (shape_.qk_norm) head = norm(head, start + "self_attn." + which + "_norm");
    rotate(head, position);
    std::copy(head.begin(), head.end(), first);
  }
  return all;
}

void SmallModel::add_attention(const std::string& start, Matrix& rows) const {
  Matrix q, k, v;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto x = norm(rows[i], start + "input_layernorm");
    q.push_back(heads_of(x, start, "q", static_cast<int>(i)));
    k.push_back(heads_of(x, start, "k", static_cast<int>(i)));
    v.push_back(heads_of(x, start, "v", static_cast<int>(i)));
  }
  const auto dim = static_cast<std::size_t>(shape_.dim);
  const auto group = static_cast<std::size_t>(shape_.heads / shape_.kv_heads);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::vector<double> out(q[i].size());
    const auto window = static_cast<std::size_t>(shape_.window);
    const std::size_t first = window > 0 && i + 1 > window ? i + 1 - window : 0;
    for (std::size_t head = 0; head < static_cast<std::size_t>(shape_.heads); ++head) {
      const std::size_t own = head * dim, other = head / group * dim;
      std::vector<double> scores;
      double sum = 0;
      for (std::size_t j = first; j <= i; ++j) {
        double score = 0;
        for (std::size_t c = 0; c < dim; ++c) score += q[i][own + c] * k[j][other + c];
        scores.push_back(std::exp(score / std::sqrt(static_cast<double>(dim))));
        sum += scores.back();
      }
      for (std::size_t j = first; j <= i; ++j)
        for (std::size_t c = 0; c < dim; ++c)
          out[own + c] += scores[j - first] / sum * v[j][other + c];
    }
    const auto added = product(out, start + "self_attn.o_proj");
    for (std::size_t c = 0; c < added.size(); ++c) rows[i][c] += added[c];
  }
}

void SmallModel::add_ffn(const std::string& start, Matrix& rows) const {
  for (auto& row : rows) {
    const auto x = norm(row, start + "post_attention_layernorm");
    auto hidden = product(x, start + "mlp.gate_proj");
    const auto up = product(x, start + "mlp.up_proj");
    for (std::size_t i = 0; i < hidden.size(); ++i) hidden[i] = silu(hidden[i]) * up[i];
    const auto added = product(hidden, start + "mlp.down_proj");
    for (std::size_t c = 0; c < added.size(); ++c) row[c] += added[c];
  }
}

std::vector<double> SmallModel::logits(const std::vector<int>& ids) const {
  Matrix rows;
  const auto& table = weights_.at("model.embed_tokens.weight").values;
  for (const int id : ids) {
    const auto first = table.begin() + static_cast<std::ptrdiff_t>(id) * shape_.d;
    rows.emplace_back(first, first + shape_.d);
  }
  for (int layer = 0; layer < shape_.layers; ++layer) {
    add_attention(start_of(layer), rows);
    add_ffn(start_of(layer), rows);
  }
  return product(norm(rows.back(), "model.norm"), shape_.tied ? "model.embed_tokens" : "lm_head");
}

std::vector<int> SmallModel::greedy(std::vector<int> ids, int count) const {
  std::vector<int> more;
  for (; count > 0; --count) {
    const auto all = logits(ids);
    const auto best = std::max_element(all.begin(), all.end()) - all.begin();
    more.push_back(static_cast<int>(best));
    ids.push_back(more.back());
  }
  return more;
}

}  // namespace fftune::testing
