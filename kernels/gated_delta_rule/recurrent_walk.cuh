// Walks over the tokens of a sequence, with rows of a state in the registers of a warp: forward,
// forward with a checkpoint before each chunk, and back.
//
// gated-delta-rule and ssd share them. Each has a tile of its own: recurrent_tile, and ssd_tile,
// which is made of it. The kernels pass a function that takes a token.
//
// A chunk's checkpoint is number first / chunk + sequence + (chunk of the sequence), where `first`
// is the sequence's first row.
#pragma once

#include "gated_delta_rule/recurrent_tile.cuh"

namespace fftune {

// The sequence and the head of a CTA.
template <class Tile>
struct recurrent_place {
  int index, head;
  delta_rule_sequence sequence;
  i64 first, end;  // rows

  __device__ __forceinline__ recurrent_place(const delta_rule_params& p) {
    const int of_head = static_cast<int>(blockIdx.x) / Tile::blocks;
    index = of_head / p.v_heads;
    head = of_head - index * p.v_heads;
    sequence = sequence_of(p, index);
    first = first_row(p, sequence, index);
    end = first + sequence.end - sequence.first;
  }
  __device__ __forceinline__ i64 checkpoint(const delta_backward_params& p, i64 row) const {
    const i64 number = first / p.chunk + index + (row - first) / p.chunk;
    return (number * p.forward.v_heads + head) * Tile::state_elements;
  }
  // In tensors with a state of each sequence.
  __device__ __forceinline__ i64 state(const delta_rule_params& p) const {
    return (static_cast<i64>(index) * p.v_heads + head) * Tile::state_elements;
  }
  // The sequence's state of those at `from`, a field of the parameters; zeros if there are none.
  template <class State, class Pointer>
  __device__ __forceinline__ void load(Tile& tile, const delta_rule_params& p,
                                       const Pointer& from) const {
    if (from != nullptr) {
      tile.load(static_cast<const State*>(from) + state(p));
    } else {
      tile.clear();
    }
  }
  // The state before the sequence, where it has one, is at `from` of state_in.
  __device__ __forceinline__ void load_cached(Tile& tile, const delta_rule_params& p,
                                              i64 from) const {
    const bool begins =
        p.state_in != nullptr && (p.has_state == nullptr || p.has_state[index] != 0);
    if (begins) {
      tile.load(static_cast<const typename Tile::State*>(p.state_in) + from);
    } else {
      tile.clear();
    }
  }
  // In a cache, or in tensors with a state of each sequence.
  __device__ __forceinline__ i64 cached_state(const delta_rule_params& p) const {
    return sequence.state * p.state_block + static_cast<i64>(head) * Tile::state_elements;
  }
};

// Keeps the states before each chunk. write(row): the tile's state behind the token.
template <class Tile, class Write>
__device__ __forceinline__ void keep_checkpoints(const delta_backward_params& p,
                                                 const recurrent_place<Tile>& place, Tile& tile,
                                                 const Write& write) {
  for (i64 row = place.first; row < place.end; ++row) {
    if ((row - place.first) % p.chunk == 0) tile.store(p.checkpoints + place.checkpoint(p, row));
    write(row);
  }
}

// Walks from the last token to the first. For each chunk it walks forward from the chunk's
// checkpoint and keeps the state before each token, in memory of this thread. Then back(row, kept)
// takes the tokens from the last on. Element [r][f] of a state is kept[(r * features + f) *
// threads].
template <class Tile, class Write, class Back>
__device__ __forceinline__ void walk_back(const delta_backward_params& p,
                                          const recurrent_place<Tile>& place, Tile& tile,
                                          const Write& write, const Back& back) {
  constexpr int rows = Tile::rows, features = Tile::features, threads = Tile::threads;
  float* const history =
      p.history + static_cast<i64>(blockIdx.x) * p.chunk * rows * features * threads + threadIdx.x;
  const i64 chunks = (place.end - place.first + p.chunk - 1) / p.chunk;
  for (i64 chunk = chunks - 1; chunk >= 0; --chunk) {
    const i64 first = place.first + chunk * p.chunk;
    const int count = static_cast<int>(place.end - first < p.chunk ? place.end - first : p.chunk);
    tile.load(p.checkpoints + place.checkpoint(p, first));
    for (int i = 0; i < count; ++i) {
      float* const kept = history + static_cast<i64>(i) * rows * features * threads;
#pragma unroll
      for (int row = 0; row < rows; ++row) {
#pragma unroll
        for (int f = 0; f < features; ++f)
          kept[(row * features + f) * threads] = tile.state[row][f];
      }
      if (i + 1 == count) break;
      write(first + i);
    }
    for (int i = count - 1; i >= 0; --i)
      back(first + i, history + static_cast<i64>(i) * rows * features * threads);
  }
}

}  // namespace fftune
