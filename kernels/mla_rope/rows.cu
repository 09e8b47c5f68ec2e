// RoPE in front of latent attention, with the norm of the latent and the row of the cache
// (mla_rope.hpp).
//
//   block          a token: its threads take pairs of all heads of q and of the key, and features
//   of
//                  the latent
//   barriers       __syncthreads behind the sines of all pairs and the warps' sums of squares
//   dependencies   nothing is read before the kernels before are complete
#include "common/async.cuh"
#include "gemm/head_row.cuh"

namespace fftune {

struct mla_rope_config {
  int nope = 0, rope = 0, rank = 0;
  head_rotation rotation = head_rotation::none;
  bool to_halves = false;  // neighbours are stored as halves
  int warps = 8;

  constexpr bool rotates() const { return rotation != head_rotation::none; }
  constexpr int pairs() const { return rotates() ? rope / 2 : 0; }
};

// Stores `pair` of the features at `from`, turned.
template <mla_rope_config config, class T>
__device__ __forceinline__ void store_turned(const T* from, T* to, int pair, float2 turn) {
  constexpr bool halves = config.rotation == head_rotation::halves;
  constexpr int half = config.rope / 2;
  const float x = to_float(from[halves ? pair : 2 * pair]);
  const float y = to_float(from[halves ? pair + half : 2 * pair + 1]);
  constexpr bool ends_in_halves = halves || config.to_halves;
  to[ends_in_halves ? pair : 2 * pair] = from_float<T>(x * turn.x - y * turn.y);
  to[ends_in_halves ? pair + half : 2 * pair + 1] = from_float<T>(y * turn.x + x * turn.y);
}

// q [m, heads, nope + rope], kv [m, rank + rope], cache [cache_rows, rank + rope], q_rope [m,
// heads, rope]. A slot of no row writes none. Positions, table, table_rows and scale are those of
// head_angles. Grid: m. Block: 32 * config.warps.
template <class T, mla_rope_config config>
__global__ void __launch_bounds__(32 * config.warps)
    mla_rope(const T* q, const T* kv, const T* norm, const int* positions, const float* table,
             const int* slots, T* cache, T* q_rope,
             const __grid_constant__ pair_frequencies<config.pairs() + 1> frequencies,
             int table_rows, float scale, int heads, int cache_rows, float epsilon) {
  constexpr int threads = 32 * config.warps, pairs = config.pairs();
  constexpr int rope = config.rope, rank = config.rank, head = config.nope + rope;
  __shared__ float2 turns[pairs + 1];
  __shared__ float sums[config.warps];
  wait_and_launch_dependents();

  const i64 token = blockIdx.x;
  const int thread = threadIdx.x;
  const T* const from = kv + token * (rank + rope);
  using real = typename choose_type<sizeof(T) == 4, double, float>::type;
  for (int pair = thread; pair < pairs; pair += threads) {
    turns[pair] = turn_of<config.rotation, real>({positions, table, table_rows, scale},
                                                 frequencies.of, token, pair, pairs);
  }
  float squares = 0;
  for (int i = thread; i < rank; i += threads) {
    const float value = to_float(from[i]);
    squares += value * value;
  }
#pragma unroll
  for (int other = 1; other < 32; other *= 2) squares += __shfl_xor_sync(~0u, squares, other);
  if (thread % 32 == 0) sums[thread / 32] = squares;
  __syncthreads();

  const T* const of_q = q + token * heads * head + config.nope;
  T* const to_q = q_rope + token * heads * rope;
  if constexpr (config.rotates()) {
    for (int i = thread; i < heads * pairs; i += threads) {
      const int of_head = i / pairs, pair = i % pairs;
      store_turned<config>(of_q + of_head * head, to_q + of_head * rope, pair, turns[pair]);
    }
  } else {
    for (int i = thread; i < heads * rope; i += threads) {
      to_q[i] = of_q[i / rope * head + i % rope];
    }
  }

  const int slot = slots[token];
  if (static_cast<u32>(slot) >= static_cast<u32>(cache_rows)) return;
  T* const to = cache + static_cast<i64>(slot) * (rank + rope);
  if constexpr (config.rotates()) {
    for (int pair = thread; pair < pairs; pair += threads) {
      store_turned<config>(from + rank, to + rank, pair, turns[pair]);
    }
  } else {
    for (int i = thread; i < rope; i += threads) to[rank + i] = from[rank + i];
  }
  squares = 0;
#pragma unroll
  for (int warp = 0; warp < config.warps; ++warp) squares += sums[warp];
  const float factor = rsqrtf(squares / rank + epsilon);
  for (int i = thread; i < rank; i += threads) {
    to[i] = from_float<T>(to_float(from[i]) * factor * to_float(norm[i]));
  }
}

}  // namespace fftune
