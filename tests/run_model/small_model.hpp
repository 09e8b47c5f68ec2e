// A small model of Llama's kind: its weights, the files that transformers would save, and what it
// computes, by plain loops in float64.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace fftune::testing {

struct ModelShape {
  int d = 32, h = 48, heads = 4, kv_heads = 2, dim = 8, layers = 2, vocabulary = 61;
  bool qkv_bias = false;  // as Qwen2 has them
  bool qk_norm = false;   // as Qwen3
  bool tied = false;      // the embedding is the head too
  bool llama3 = false;    // its scaled angles
  int window = 0;         // as Mistral; 0: none
  double base = 10000;
};

class SmallModel {
 public:
  explicit SmallModel(const ModelShape& shape);

  /// config.json and model.safetensors, or `shards` files of it with an index. "F32" or "BF16".
  void write(const std::filesystem::path& folder, int shards = 1,
             const std::string& dtype = "F32") const;

  /// The logits of the last of these tokens.
  std::vector<double> logits(const std::vector<int>& ids) const;
  /// The ids that follow, each the one of the largest logit.
  std::vector<int> greedy(std::vector<int> ids, int count) const;

 private:
  using Matrix = std::vector<std::vector<double>>;

  struct Weight {
    std::vector<std::int64_t> shape;
    std::vector<float> values;
  };

  void add(const std::string& name, const std::vector<std::int64_t>& shape, double deviation,
           double mean = 0);
  std::vector<double> product(const std::vector<double>& x, const std::string& weight) const;
  std::vector<double> norm(const std::vector<double>& x, const std::string& weight) const;
  void rotate(std::vector<double>& head, int position) const;
  std::vector<double> heads_of(const std::vector<double>& x, const std::string& start,
                               const std::string& which, int position) const;
  void add_attention(const std::string& start, Matrix& rows) const;
  void add_ffn(const std::string& start, Matrix& rows) const;

  ModelShape shape_;
  std::map<std::string, Weight> weights_;
};

}  // namespace fftune::testing
