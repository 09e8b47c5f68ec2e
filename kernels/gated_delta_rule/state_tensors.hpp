// Parts of the descriptions of ops with a state for each head: rows of tokens, states of sequences
// or in a cache, and their options.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common/test_data.hpp"
#include "kernels/gated_delta_rule/gated_delta_rule.hpp"

namespace fftune::gated_delta_rule {

constexpr std::int64_t most_stride = std::int64_t{1} << 34;
constexpr std::int64_t most_tokens = std::int64_t{1} << 24;
constexpr std::int64_t most_heads = 1024;

class TensorList {
 public:
  explicit TensorList(const Layer& layer) : layer_(layer) {}

  /// A tensor with rows of tokens, each of `heads` times `features`.
  TensorSpec& rows(std::string name, DType dtype, Role role, std::int64_t heads,
                   std::int64_t features, std::int64_t row = 0);
  TensorSpec& states(std::string name, Role role);
  TensorSpec& add(TensorSpec spec);
  /// d_out and d_final_state, of the backward pass.
  void add_d_out();
  /// initial_state, or the cache with its indices; has_state and offsets. Behind them, of the
  /// forward pass, out and final_state.
  void add_states_and_out();
  void add_d_initial_state();
  std::vector<TensorSpec> tensors() && { return std::move(tensors_); }

 private:
  void add_cache();
  void add_sequences();

  const Layer& layer_;
  std::vector<TensorSpec> tensors_;
};

/// The sizes s and b.
std::vector<SizeField> sequence_sizes();
/// The sizes states and state-block. `usual_block`: elements of a sequence's state.
std::vector<SizeField> cache_sizes(const std::string& state, const WhenAbsent& usual_block);
/// The options initial-state, final-state, indices, has-state and state-dtype.
std::vector<OptionField> state_options();
OptionField layout_option();
OptionField null_index_option();

/// Sets the options of states, and the cache's sizes, of a layer with its other sizes.
void read_states(const Op& op, const Problem& problem, Layer& layer);
/// Why these do not go together; empty if they do. `state`: the product of sizes of a state.
std::string state_contradiction(const Problem& problem, const Layer& layer,
                                const std::string& state);
/// Why a stride between tokens is too short; empty if none is.
struct StridedRow {
  const char* name;  // of the size, without "-row"
  std::int64_t row, features;
};
std::string row_contradiction(std::initializer_list<StridedRow> rows);

/// The work of a pass.
struct StateWork {
  double flops = 0;         // of a token, for each element of a state
  int inner_roundings = 0;  // of chunks of tokens on the tensor cores
};
/// Completes the stage of a pass. Parts of packed rows and of a cache are not read.
void complete_state_stage(const Layer& layer, const StateWork& work, StageSpec& stage);

}  // namespace fftune::gated_delta_rule
