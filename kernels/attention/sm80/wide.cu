// The attention forward by mma.sync at heads of 258 to 512 features, for sm_80 and newer.
//
// The accumulators of an output are too many for a warp that has all features of its queries, and
// queries read from shared memory for each step are too many bytes. Four warps have 32 queries
// together, and each a quarter of the features:
//
//   a block of keys, of each row group      warp 0     warp 1     warp 2     warp 3
//     S = Q K^T over features               quarter 0  quarter 1  quarter 2  quarter 3
//     sums of the four; softmax of keys     0-7        8-15       16-23      24-31
//     O += P V of columns                   quarter 0  quarter 1  quarter 2  quarter 3
//
//   shared memory   Q, whose place O takes at the end; keys; values; sums, then probabilities
//   cp.async        the next keys under the softmax and the product with values, the next values
//                   under the product with keys
//   barriers        a block: keys are there; sums are there, and keys read; largest scores are
//                   there (row group); values and probabilities are there; these are read
//
// Grid: a CTA for each tile of queries of each head. Block: config.threads().
#include "attention/key_walk.cuh"
#include "attention/mma_tile.cuh"
#include "attention/sm80/tile_rows.cuh"
#include "attention/sm80/wide_config.cuh"
#include "common/async.cuh"
#include "common/numerics.cuh"

namespace fftune {

template <attention_form form, attention_wide_sm80_config config>
class wide_sm80_attention {
  using T = element_type<form.type>;
  static constexpr attention_wide_sm80_plan plan = attention_wide_sm80_plan_of(form, config);
  static constexpr int dim = form.dim, bm = config.bm(), bn = config.bn;
  static constexpr int threads = config.threads(), slices = plan.slices;
  static constexpr int steps = plan.own_columns / 16, blocks = plan.own_columns / 8;
  using chunks_of_row = row_chunks<T, dim>;
  using tile_rows = attention_tile_rows<form>;
  using layout = attention_row_layout<plan.columns>;
  using scheduler = attention_tile_scheduler<form, bm, 1>;
  using walk = key_walk<form, bm, bm, bn>;
  static_assert(bn % 16 == 0 && slices <= 4 && form.mask != attention_mask::packed);
  static_assert(bm * plan.probability_pitch <= config.row_groups * plan.partial_bytes);

  const attention_params& p;
  u32 shared;

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int row_group() { return threadIdx.x / 128; }
  static __device__ __forceinline__ int quarter() { return threadIdx.x / 32 % 4; }
  // A row of a tile that has accumulators of this thread.
  static __device__ __forceinline__ int own_row(int tile, int half) {
    return row_group() * 32 + tile * 16 + half * 8 + lane() / 4;
  }
  static __device__ __forceinline__ void sync_row_group() {
    named_barrier_sync(1 + row_group(), 128);
  }
  // A block of keys or of values. Keys past the end are zeros, whatever lies there.
  __device__ __forceinline__ void load_block(const attention_tile& tile, const void* tensor,
                                             i64 batch_stride, int row_stride, int block,
                                             u32 to) const {
    const int kv_head = tile.head / (p.heads / p.kv_heads);
    const T* const from =
        static_cast<const T*>(tensor) + kv_head * p.kv_head +
        (form.packed_sequences() || form.paged ? 0 : tile.sequence.index * batch_stride);
#pragma unroll 4
    for (int index = threadIdx.x; index < bn * layout::chunks; index += threads) {
      const int row = index / layout::chunks, chunk = index % layout::chunks;
      const int key = block * bn + row;
      bool exists = key < tile.sequence.kv_len;
      i64 token = key;
      if constexpr (form.paged) {
        const int page = exists ? page_table(p, tile.sequence.index)[key / p.page] : -1;
        exists = has_page(p, page);
        token = static_cast<i64>(page) * p.page + key % p.page;
      } else if constexpr (form.packed_sequences()) {
        token += tile.sequence.kv_first;
      }
      chunks_of_row::copy(to + layout::offset(row, chunk), from + token * row_stride, chunk,
                          exists && chunk * 8 < dim);
    }
    copy_async_commit();
  }
  __device__ __forceinline__ void load_keys(const attention_tile& tile, int block) const {
    load_block(tile, p.k, p.k_batch, p.k_row, block, shared + plan.k_at);
  }
  __device__ __forceinline__ void load_values(const attention_tile& tile, int block) const {
    load_block(tile, p.v, p.v_batch, p.v_row, block, shared + plan.v_at);
  }

  using partial_scores = float[2][bn / 8][4];
  using scores = float[2][4];
  using output = float[2][blocks][4];

  // Where a warp leaves its sums over its features, of all keys, for the warp of each slice.
  __device__ __forceinline__ u32 partial_at(int from, int slice, int tile) const {
    return shared + plan.partials_at + row_group() * plan.partial_bytes +
           (((from * slices + slice) * 2 + tile) * 32 + lane()) * 16;
  }
  __device__ __forceinline__ u32 largest_at(int row, int slice) const {
    return shared + plan.largest_at + (row * 4 + slice) * 4;
  }
  __device__ __forceinline__ u32 probabilities() const {
    return shared + plan.partials_at + row_group() * plan.partial_bytes;
  }

  __device__ __forceinline__ void multiply_keys() const {
    partial_scores s = {};
    const u32 q = layout::below(shared + layout::row_fragment(lane()), row_group() * 32);
    const u32 k = shared + plan.k_at + layout::key_fragment(lane());
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const int at = quarter() * steps + step;
      u32 a[2][4];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        load_matrices(a[tile][0], a[tile][1], a[tile][2], a[tile][3],
                      layout::next_rows(layout::advance(q, at), tile * 16));
      }
#pragma unroll
      for (int pair = 0; pair < bn / 16; ++pair) {
        u32 b[2][2];
        load_matrices(b[0][0], b[0][1], b[1][0], b[1][1],
                      layout::next_rows(layout::advance(k, at), pair * 16));
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          mma_16x8x16<T>(s[tile][2 * pair], a[tile], b[0]);
          mma_16x8x16<T>(s[tile][2 * pair + 1], a[tile], b[1]);
        }
      }
    }
#pragma unroll
    for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float(&own)[4] = s[tile][slice];
        store_shared(partial_at(quarter(), slice, tile),
                     make_float4(own[0], own[1], own[2], own[3]));
      }
    }
  }

  // The sums of the four warps, in a fixed order.
  __device__ __forceinline__ void add_up(scores& s) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float4 sum = load_shared(partial_at(0, quarter(), tile));
#pragma unroll
      for (int from = 1; from < 4; ++from) {
        const float4 other = load_shared(partial_at(from, quarter(), tile));
        sum.x += other.x;
        sum.y += other.y;
        sum.z += other.z;
        sum.w += other.w;
      }
      s[tile][0] = sum.x;
      s[tile][1] = sum.y;
      s[tile][2] = sum.z;
      s[tile][3] = sum.w;
    }
  }

  // Soft cap, bias and mask.
  __device__ __forceinline__ void transform(scores& s, const attention_tile& tile, int block,
                                            bool masked, const score_scaling<form>& scaling) const {
    const int first_key = block * bn + quarter() * 8 + lane() % 4 * 2;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = tile.first_row + own_row(m, half);
        const key_range keys = keys_of_row<form>(p, tile.sequence, row);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = s[m][half * 2 + e];
          const int key = first_key + e;
          score = scaling.cap(score);
          if constexpr (form.bias) {
            const int existing = smaller(row, larger(tile.sequence.q_len - 1, 0));
            const T* const bias = static_cast<const T*>(p.bias) +
                                  tile.sequence.index * p.bias_batch + tile.head * p.bias_head +
                                  static_cast<i64>(existing) * p.bias_row;
            score =
                scaling.add_bias(score, key < tile.sequence.kv_len ? to_float(bias[key]) : 0.0f);
          }
          if (masked && (key < keys.first || key >= keys.last)) score = minus_infinity();
        }
      }
    }
  }

  // The softmax of a warp's slice. All warps of a row group keep the same references.
  __device__ __forceinline__ void update(softmax_row (&rows)[2][2], output& o,
                                         const attention_tile& tile, int block, bool masked,
                                         const score_scaling<form>& scaling) const {
    scores s;
    const bool has_slice = slices == 4 || quarter() < slices;
    if (has_slice) {
      add_up(s);
      transform(s, tile, block, masked, scaling);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float most = fmaxf(s[m][half * 2], s[m][half * 2 + 1]);
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
          if (lane() % 4 == 0) store_shared(largest_at(own_row(m, half), quarter()), most);
        }
      }
    }
    sync_row_group();
    float rescale[2][2];
    bool rescales = false;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 most = load_shared(largest_at(own_row(m, half), 0));
        float largest = fmaxf(most.x, most.y);
        if constexpr (slices == 4) largest = fmaxf(largest, fmaxf(most.z, most.w));
        rescale[m][half] = rows[m][half].rescale_if_exceeded(largest * scaling.factor());
        rescales |= rescale[m][half] != 1.0f;
      }
    }
    if (has_slice) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          softmax_row& row = rows[m][half];
          const float offset = row.offset();
          float power[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            power[e] = approximate_exp2(__fmaf_rn(s[m][half * 2 + e], scaling.factor(), -offset));
            row.sum += power[e];
          }
          store_shared_word(probabilities() +
                                (m * 16 + half * 8 + lane() / 4) * plan.probability_pitch +
                                (quarter() * 8 + lane() % 4 * 2) * 2,
                            pack<T>(power[0], power[1]));
        }
      }
    }
    if (__any_sync(~0u, rescales)) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int column = 0; column < blocks; ++column) {
#pragma unroll
          for (int i = 0; i < 4; ++i) o[m][column][i] *= rescale[m][i / 2];
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_values(output& o) const {
    const u32 from = probabilities() + lane() % 16 * plan.probability_pitch + lane() / 16 * 16;
    const u32 v = shared + plan.v_at + layout::row_fragment(lane());
#pragma unroll
    for (int step = 0; step < bn / 16; ++step) {
      u32 a[2][4];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        load_matrices(a[tile][0], a[tile][1], a[tile][2], a[tile][3],
                      from + tile * 16 * plan.probability_pitch + step * 32);
      }
#pragma unroll
      for (int pair = 0; pair < blocks / 2; ++pair) {
        u32 b[2][2];
        load_matrices_transposed(
            b[0][0], b[0][1], b[1][0], b[1][1],
            layout::next_rows(layout::advance(v, quarter() * steps + pair), step * 16));
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          mma_16x8x16<T>(o[tile][2 * pair], a[tile], b[0]);
          mma_16x8x16<T>(o[tile][2 * pair + 1], a[tile], b[1]);
        }
      }
    }
  }

  // The sums of a row's slices, and its output by way of shared memory, 16 bytes at a time.
  __device__ __forceinline__ void store(const attention_tile& tile, const output& o,
                                        const softmax_row (&rows)[2][2]) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = rows[m][half].sum;
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (lane() % 4 == 0) store_shared(largest_at(own_row(m, half), quarter()), sum);
      }
    }
    __syncthreads();  // Q is read, too
    const float sink = form.sinks ? p.sinks[tile.head] : minus_infinity();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = own_row(m, half);
        const float4 sums = load_shared(largest_at(row, 0));
        softmax_row whole = rows[m][half];
        whole.sum = (sums.x + sums.y) + (sums.z + sums.w);
        const softmax_result result = finish_softmax(whole, sink);
        if constexpr (form.lse) {
          if (quarter() == 0 && lane() % 4 == 0 && tile.first_row + row < tile.sequence.q_len) {
            tile_rows{p, tile}.store_lse(row, result);
          }
        }
#pragma unroll
        for (int column = 0; column < blocks; ++column) {
          store_shared_word(
              shared + layout::offset(row, quarter() * blocks + column) + lane() % 4 * 4,
              pack<T>(o[m][column][half * 2] * result.factor,
                      o[m][column][half * 2 + 1] * result.factor));
        }
      }
    }
    __syncwarp();
    T* const out = static_cast<T*>(p.out) + tile.head * dim;
#pragma unroll 4
    for (int index = lane(); index < 32 * blocks; index += 32) {
      const int row = row_group() * 32 + index / blocks;
      const int chunk = quarter() * blocks + index % blocks;
      if (tile.first_row + row < tile.sequence.q_len && chunk * 8 < dim) {
        chunks_of_row::store(tile_rows{p, tile}.at(out, row, p.out_batch, p.out_row), chunk,
                             load_shared(shared + layout::offset(row, chunk)));
      }
    }
  }

 public:
  __device__ __forceinline__ wide_sm80_attention(const attention_params& params, u32 shared_memory)
      : p(params), shared(shared_memory) {}

  __device__ __forceinline__ void run() const {
    const score_scaling<form> scaling(p);
    const scheduler work(p);
    if (!work.is_valid()) return;
    const attention_tile tile = work.tile();
    walk keys(p, tile, 0);
    output o = {};
    softmax_row rows[2][2];
    if (keys.is_valid()) {
      tile_rows{p, tile}.template load_q<layout, bm, threads>(shared);
      load_keys(tile, keys.block());
      load_values(tile, keys.block());
    }
    while (keys.is_valid()) {
      const int block = keys.block();
      const bool masked = keys.masked();
      keys.next(p, tile, 0);
      copy_async_wait<1>();
      __syncthreads();  // queries and keys are there
      multiply_keys();
      __syncthreads();  // sums are there, and keys are read
      if (keys.is_valid()) {
        load_keys(tile, keys.block());
      } else {
        copy_async_commit();  // so that waits can count groups
      }
      update(rows, o, tile, block, masked, scaling);
      copy_async_wait<1>();
      __syncthreads();  // values and probabilities are there
      multiply_values(o);
      __syncthreads();  // they are read
      if (keys.is_valid()) load_values(tile, keys.block());
    }
    copy_async_wait<0>();
    store(tile, o, rows);
  }
};

template <attention_form form, attention_wide_sm80_config config>
__global__ void __launch_bounds__(config.threads(), 1)
    attention_wide_sm80(const __grid_constant__ attention_params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  wait_and_launch_dependents();
  wide_sm80_attention<form, config>(p, shared_address(shared_memory)).run();
}

}  // namespace fftune
