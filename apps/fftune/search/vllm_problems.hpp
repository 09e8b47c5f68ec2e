// The problems that vLLM's plugin gives to the library for a model, by the model's configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "apps/fftune/search/tune.hpp"
#include "device/facts.hpp"
#include "registry/catalog.hpp"
#include "store/json.hpp"

namespace fftune::tool {

/// How vLLM serves the model: its options of the same names.
struct VllmServing {
  std::int64_t tensor_parallel = 1;
  std::int64_t max_model_len = 0;  // 0: the configuration's max_position_embeddings
  std::int64_t block_size = 16;
  std::int64_t max_num_seqs = 1024;
  std::vector<std::int64_t> tokens = {};  // of a batch; empty: powers of two that have graphs
  bool every_graph = false;               // all sizes of graphs instead of those
  // Parts of the plugin, as it has them by default.
  bool experts = true, layers = true;
  bool linears = true;         // with weights of 4 and 8 bits
  bool packed_experts = true;  // likewise
  bool int4_linears = false;   // those of 4 bits alone
  bool linear_attention = true;
  bool fp8_linears = false;
  bool ranks = false;    // layers under tensor parallelism
  bool states = false;   // layers with states
  bool prompts = false;  // of layers, the batches with prompts
  bool batch_invariant = false;

  /// Whether linear layers with weights of so many bits are among the parts.
  bool serves(std::int64_t bits) const { return linears || (int4_linears && bits == 4); }
};

struct VllmProblems {
  std::vector<SearchedOp> ops;
  /// Parts of the model that stay vLLM's, each with the reason, one line.
  std::vector<std::string> left_alone;
};

/// The numbers of tokens for which vLLM captures a CUDA graph of a step of decoding.
std::vector<std::int64_t> graph_sizes(std::int64_t max_num_seqs);

/// Throws Error(invalid_input) that names the field of a configuration that cannot be read, and if
/// the plugin leaves all of the model alone.
VllmProblems vllm_problems(const Catalog& catalog, const JsonValue& config,
                           const VllmServing& serving, DeviceKind kind);

}  // namespace fftune::tool
