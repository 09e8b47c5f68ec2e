// Parts of the descriptions of ops with a state for each head: rows of tokens, states of sequences
// or in a cache, and their options.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/gated_delta_rule/gated_delta_rule.hpp"

namespace fftune::gated_delta_rule {

constexpr std::int64_t most_stride = std::int64_t{1} << 34;
constexpr std::int64_t most_tokens = std::int64_t{1} << 24;
constexpr std::int64_t most_heads = 1024;

/// Test data: each value is drawn by itself from a generator.
template <typename Value>
std::function<void(std::uint64_t, std::span<double>)> each(Value value) {
  return [value](std::uint64_t seed, std::span<double> values) {
    std::mt19937_64 random(seed);
    for (double& one : values) one = value(random);
  };
}
inline double uniform(std::mt19937_64& random) {
  return static_cast<double>(random() >> 11) / 0x1p53;
}

class TensorList {
 public:
  explicit TensorList(const Layer& layer) : layer_(layer) {}

  /// A tensor with rows of tokens, each of `heads` times `features`.
  TensorSpec& rows(std::string name, DType dtype, Role role, std::int64_t heads,
                   std::int64_t features, std::int64_t row = 0);
  TensorSpec& states(std::string name, Role role);
  TensorSpec& add(TensorSpec spec);
  /// initial_state, or the cache with its indices.
  void add_cache();
  /// has_state and offsets.
  void add_sequences();
  std::vector<TensorSpec> tensors() && { return std::move(tensors_); }

 private:
  const Layer& layer_;
  std::vector<TensorSpec> tensors_;
};

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
/// Takes parts of packed rows and of a cache that are not read from the stage's bytes.
void skip_unread(const Layer& layer, StageSpec& stage);

}  // namespace fftune::gated_delta_rule
