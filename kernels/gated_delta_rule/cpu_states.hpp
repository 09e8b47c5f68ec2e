// Parts of the CPU families of ops with a state for each head: the tensors of a call as floats, the
// places of states, and tasks that have rows of states.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "kernels/gated_delta_rule/gated_delta_rule.hpp"

namespace fftune::gated_delta_rule {

/// `OpLayer` is the op's Layer, or a struct derived from it.
template <class OpLayer>
class HostStates {
 public:
  HostStates(OpLayer op_layer, const HostCall& call, TensorPlaces places)
      : layer(std::move(op_layer)), call_(call), places_(std::move(places)) {}

  const OpLayer layer;

  Tokens tokens(std::int64_t sequence) const {
    return tokens_of(layer, layer.packed ? data<std::int32_t>("offsets") : nullptr, sequence);
  }
  /// The place of a sequence's state in its tensor; -1 for padding.
  std::int64_t state_place(std::int64_t sequence) const {
    if (!layer.indices) return sequence * layer.state_elements();
    return entry_place(
        first_slot_of(layer, layer.slots > 0 ? data<std::int32_t>("accepted") : nullptr, sequence));
  }
  /// Where the state behind a sequence's token goes, if each has a slot; -1 for nowhere.
  std::int64_t slot_place(std::int64_t sequence, std::int64_t token) const {
    return token < layer.slots ? entry_place(sequence * layer.slots + token) : -1;
  }
  /// The tensor that a sequence begins with; null for zeros.
  const char* first_state(std::int64_t sequence) const {
    if (layer.has_state && data<std::uint8_t>("has_state")[sequence] == 0) return nullptr;
    return layer.indices ? "states" : layer.initial ? "initial_state" : nullptr;
  }
  /// The tensor that the state behind the last token goes to; null for none.
  const char* last_state() const {
    if (layer.slots > 0) return nullptr;
    return layer.indices ? "states" : layer.final ? "final_state" : nullptr;
  }

  template <typename Value>
  Value* data(const char* name) const {
    return static_cast<Value*>(address_of(call_, places_.at(name)));
  }
  void read(const char* name, DType dtype, std::int64_t place, std::span<float> values) const {
    decode(dtype, element(name, dtype, place), values);
  }
  void write(const char* name, DType dtype, std::int64_t place,
             std::span<const float> values) const {
    encode(dtype, values, element(name, dtype, place));
  }

 private:
  std::int64_t entry_place(std::int64_t of_indices) const {
    const std::int64_t entry = data<std::int32_t>("state_indices")[of_indices];
    return entry <= layer.null_index || entry >= layer.states ? -1 : entry * layer.state_block;
  }
  std::byte* element(const char* name, DType dtype, std::int64_t place) const {
    return data<std::byte>(name) + static_cast<std::size_t>(place) * dtype_bytes(dtype);
  }

  const HostCall& call_;
  TensorPlaces places_;
};

/// The parameter of recurrent families: rows of a state that a task has.
inline Space state_rows_space(const Layer& layer) {
  Space space;
  space.parameter("rows", "rows of a state that a task has", {8, 16, 32, 64, 128, 256})
      .constraint("a task has no more rows than a state",
                  [rows = layer.v_dim](const Config& c) {
                    return c.get("rows") == 8 || c.at("rows") < 2 * rows;
                  },
                  {"rows"});
  return space;
}
/// Few sequences leave no thread idle then; a token is read for every 32 rows.
inline Config state_rows_default(const Layer& layer) {
  return {{"rows", layer.v_dim > 16 ? 32 : 8}};
}

/// Calls walk(sequence, value head, first row, end) for the blocks of `rows` rows of all states,
/// which do not depend on each other.
template <class Walk>
void for_each_state_rows(const Layer& layer, std::int64_t rows, Parallel& parallel,
                         const Walk& walk) {
  const std::int64_t blocks = (layer.v_dim + rows - 1) / rows, tasks = layer.v_heads * blocks;
  parallel.run(static_cast<int>(layer.b * tasks), parallel.max_threads(), [&](int task) {
    const std::int64_t first = task % blocks * rows;
    walk(task / tasks, task % tasks / blocks, first, std::min(layer.v_dim, first + rows));
  });
}

}  // namespace fftune::gated_delta_rule
