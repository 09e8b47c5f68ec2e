// What the definitions of ops with a state for each head share: sequences and their states.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/gated_delta_rule/gated_delta_rule.hpp"

namespace fftune::gated_delta_rule {

inline double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}
inline double softplus(double x) {
  return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}

class ReferenceStates {
 protected:
  using Values = std::vector<double>;  // of a state [v-dim, dim]

  ReferenceStates(const Layer& layer, ReferenceTensors& tensors) : t_(tensors), layer_(layer) {}

  static std::size_t index(std::int64_t place) { return static_cast<std::size_t>(place); }
  std::size_t at(std::int64_t v, std::int64_t k) const { return index(v * layer_.dim + k); }

  Tokens of_sequence(std::int64_t sequence) const {
    return tokens_of(layer_, layer_.packed ? t_.at("offsets").data() : nullptr, sequence);
  }
  /// The entry of the cache that the sequence begins with; 0 without a cache, -1 for padding.
  std::int64_t entry_of(std::int64_t sequence) const {
    if (!layer_.indices) return 0;
    return entry_at(
        first_slot_of(layer_, layer_.slots > 0 ? t_.at("accepted").data() : nullptr, sequence));
  }
  /// The entry at a place of state_indices; -1 for padding.
  std::int64_t entry_at(std::int64_t place) const {
    const auto entry = static_cast<std::int64_t>(t_.at("state_indices")[index(place)]);
    return entry <= layer_.null_index || entry >= layer_.states ? -1 : entry;
  }
  Values first_state(std::int64_t sequence, std::int64_t j) const {
    Values state(index(layer_.v_dim * layer_.dim));
    if (layer_.has_state && t_.at("has_state")[index(sequence)] == 0) return state;
    if (!layer_.initial && !layer_.indices) return state;
    const Values& from = t_.at(layer_.initial ? "initial_state" : "states");
    const std::int64_t first = layer_.initial ? sequence * layer_.state_elements()
                                              : entry_of(sequence) * layer_.state_block;
    for_state(first, j, [&](std::size_t of_state, std::size_t of_tensor) {
      state[of_state] = from[of_tensor];
    });
    return state;
  }
  void store(const char* name, std::int64_t first, std::int64_t j, const Values& state) {
    Values& to = t_.at(name);
    for_state(first, j, [&](std::size_t of_state, std::size_t of_tensor) {
      to[of_tensor] = state[of_state];
    });
  }

  ReferenceTensors& t_;

 private:
  /// Calls run(place in a state, place in a tensor of states) for the state of head j.
  template <typename Run>
  void for_state(std::int64_t first, std::int64_t j, const Run& run) const {
    for (std::int64_t v = 0; v < layer_.v_dim; ++v)
      for (std::int64_t k = 0; k < layer_.dim; ++k)
        run(at(v, k), index(first + j * layer_.v_dim * layer_.dim + layer_.state_at(v, k)));
  }

  const Layer& layer_;
};

}  // namespace fftune::gated_delta_rule
