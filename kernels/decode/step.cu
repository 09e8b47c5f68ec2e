// The first and the last stage of a step of decoding (decode/decode.hpp).
//
//   embed_tokens     a block has a part of a row of x. The first block of a row also finds where
//   the
//                    sequence's token goes. Grid: batch * parts
//   advance_tokens   a thread has a sequence
#include "common/async.cuh"
#include "common/vectors.cuh"
#include "layer/next_token.cuh"

namespace fftune {

struct step_config {
  int vector;    // elements that a thread moves at once
  int page;      // keys of a page; 0: contiguous
  bool rotates;  // layers read positions
};

constexpr int embed_threads = 128, advance_threads = 128;

template <class T, step_config config>
__global__ void __launch_bounds__(embed_threads)
    embed_tokens(const int* ids, const int* lengths, const int* ended, const int* pages,
                 const T* embedding, T* x, int* positions, int* slots, int* keys, float scale,
                 int d, int vocab, int cache, int table, int rows) {
  wait_and_launch_dependents();
  const int parts = ceil_div(d, embed_threads * config.vector);
  const int row = static_cast<int>(blockIdx.x) / parts, part = static_cast<int>(blockIdx.x) % parts;
  const int id = ids[row];
  const bool exists = id >= 0 && id < vocab;
  const int column = (part * embed_threads + static_cast<int>(threadIdx.x)) * config.vector;
  if (column < d) {
    using elements = aligned_vector<T, config.vector>;
    const T* const from = embedding + static_cast<i64>(id) * d + column;
    float values[config.vector];
    to_floats(load_through_l1<T, config.vector>(from, exists), values);
#pragma unroll
    for (int i = 0; i < config.vector; ++i) values[i] *= scale;
    *reinterpret_cast<elements*>(x + static_cast<i64>(row) * d + column) = from_floats<T>(values);
  }
  if (part > 0 || threadIdx.x > 0) return;
  const int length = lengths[row];
  const bool alive = goes_on(ended[row], length, cache);
  const int count = alive ? larger(length, 0) + 1 : larger(smaller(length, cache), 1);
  const int position = count - 1;
  keys[row] = count;
  if constexpr (config.rotates) positions[row] = position;
  int slot = rows;
  if (alive) {
    if constexpr (config.page > 0) {
      const int page = pages[static_cast<i64>(row) * table + position / config.page];
      if (page >= 0 && page < rows / config.page)
        slot = page * config.page + position % config.page;
    } else {
      slot = row * cache + position;
    }
  }
  slots[row] = slot;
}

__global__ void __launch_bounds__(advance_threads)
    advance_tokens(const int* chosen, const int* limits, const int* stop, int* ids, int* lengths,
                   int* steps, int* ended, int* out, int batch, int cache, int stops, int room,
                   int pad) {
  wait_and_launch_dependents();
  const int row = static_cast<int>(blockIdx.x) * advance_threads + threadIdx.x;
  if (row >= batch) return;
  advance_sequence({.limits = limits,
                    .stop = stop,
                    .ids = ids,
                    .lengths = lengths,
                    .steps = steps,
                    .ended = ended,
                    .out = out,
                    .cache = cache,
                    .stops = stops,
                    .room = room,
                    .pad = pad},
                   row, chosen[row]);
}

}  // namespace fftune
