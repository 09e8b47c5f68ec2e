// The attention forward by mma.sync, for sm_80 and newer: out = softmax(q k^T) v without the scores
// ever being in memory. Even head dims, and every form.
//
//   CTA             bm queries of a head; each warp has 16 m_tiles rows of them, and all keys
//   cp.async        Q once, and `stages` - 1 blocks of keys and values ahead of the products
//
//      keys ->   | bn | bn | bn | bn | ...     from the last block to the first (key_walk.cuh)
//      warp 0    |  S = Q K^T, online softmax in registers, O += P V
//      warp 1    |
//
//   shared memory   Q, whose place O takes at the end; [stage][K, V]
//   barriers        one __syncthreads a block: the block has arrived for all threads, and the stage
//                   that is loaded next is free
//
// Grid: a CTA for each tile of queries of each head, (ceil(q_len / bm)) x heads x batch; in thd at
// most (ceil(tokens / bm) + batch) x heads. Block: config.threads().
#include "attention/e4m3_tile.cuh"
#include "attention/key_walk.cuh"
#include "attention/mma_tile.cuh"
#include "attention/sm80/config.cuh"
#include "attention/sm80/tile_rows.cuh"
#include "common/async.cuh"
#include "common/numerics.cuh"

namespace fftune {

// Heads of v and out have v_dim features, as many as those of q and k or fewer.
template <attention_form form, int v_dim, attention_sm80_config config>
class sm80_attention {
  using T = element_type<form.type>;
  static constexpr attention_sm80_plan plan = attention_sm80_plan_of(form, v_dim, config);
  static constexpr int dim = form.dim, m_tiles = config.m_tiles, bm = config.bm(), bn = config.bn;
  static constexpr int stages = config.stages, threads = config.threads();
  static constexpr int warp_rows = m_tiles * 16;
  static constexpr bool packed = form.mask == attention_mask::packed;
  using e4m3_products = e4m3_tile<T, dim, m_tiles>;
  using products =
      typename choose_type<form.e4m3, e4m3_products, mma_tile<T, dim, m_tiles>>::type;  // S
  using sums =
      typename choose_type<form.e4m3, e4m3_products, mma_tile<T, v_dim, m_tiles>>::type;  // O
  using queries = mma_tile<T, dim, m_tiles>;
  using chunks_of_row = row_chunks<T, dim>;
  using chunks_of_value = row_chunks<T, v_dim>;
  using tile_rows = attention_tile_rows<form>;
  using layout = attention_row_layout<dim>;
  using value_layout = attention_row_layout<v_dim>;
  // K and V of e4m3 are addressed in words of 16 bits.
  static constexpr int kv_words = attention_kv_words(form);
  using kv_layout = attention_row_layout<kv_words>;
  using v_layout = typename choose_type<form.e4m3, kv_layout, value_layout>::type;
  using chunks_of_kv = row_chunks<T, kv_words>;
  using scheduler = attention_tile_scheduler<form, bm, 1>;
  using walk = key_walk<form, bm, bm, bn>;
  using scores = float[m_tiles][bn / 8][4];
  static_assert(stages >= 2 && bn % 16 == 0 && v_dim <= dim && (!form.e4m3 || v_dim == dim));

  const attention_params& p;
  u32 shared;

  // Words of so many elements of K or V.
  template <class Integer>
  static __device__ __forceinline__ Integer words_of(Integer elements) {
    return form.e4m3 ? elements >> 1 : elements;
  }
  // Q with its features in the order of e4m3_tile: a word of two of them at a time.
  __device__ __forceinline__ void load_q_words(const attention_tile& tile) const {
    const T* const q = static_cast<const T*>(p.q) + tile.head * dim;
    const tile_rows rows{p, tile};
#pragma unroll 2
    for (int index = threadIdx.x; index < bm * layout::chunks; index += threads) {
      const int row = index / layout::chunks, chunk = index % layout::chunks;
      const T* const from = rows.at(q, row, p.q_batch, p.q_row);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int column = chunk / 2 * 16 + (2 * word + chunk % 2) * 2;
        copy_async_narrow<4>(shared + layout::offset(row, chunk) + word * 4, from + column,
                             rows.exists(row) && column < dim);
      }
    }
  }

  static __device__ __forceinline__ int lane() {
    return threadIdx.x % 32;
  }
  static __device__ __forceinline__ int warp() {
    return threadIdx.x / 32;
  }
  // The row of a tile that has this thread's accumulators.
  static __device__ __forceinline__ int own_row(int tile, int half) {
    return warp() * warp_rows + tile * 16 + half * 8 + lane() / 4;
  }
  // A block of keys and its values. Keys past the end are zeros, whatever lies there.
  __device__ __forceinline__ void load_block(const attention_tile& tile, int block,
                                             int slot) const {
    const int kv_head = tile.head / (p.heads / p.kv_heads);
    const T* const k = static_cast<const T*>(p.k) + words_of(kv_head * p.kv_head);
    const T* const v =
        static_cast<const T*>(p.v) + words_of(kv_head * (v_dim == dim ? p.kv_head : v_dim));
    const u32 to = shared + plan.stages_at + slot * plan.stage_bytes;
    constexpr int chunks = kv_layout::chunks, copies = bn * chunks;
    constexpr int each = ceil_div(copies, threads);
#pragma unroll
    for (int copy = 0; copy < each; ++copy) {
      const int index = copy * threads + static_cast<int>(threadIdx.x);
      if (copies % threads != 0 && index >= copies) break;
      const int row = index / chunks, chunk = index % chunks;
      const int key = block * bn + row;
      bool exists = key < tile.sequence.kv_len;
      i64 token = key, k_at = 0, v_at = 0;
      if constexpr (form.paged) {
        const int* const table = page_table(p, tile.sequence.index);
        const int page = exists ? table[key / p.page] : -1;
        exists = has_page(p, page);
        token = static_cast<i64>(page) * p.page + key % p.page;
      } else if constexpr (form.packed_sequences()) {
        token += tile.sequence.kv_first;
      } else {
        k_at = tile.sequence.index * p.k_batch;
        v_at = tile.sequence.index * p.v_batch;
      }
      const u32 at = to + kv_layout::offset(row, chunk);
      chunks_of_kv::copy(at, k + words_of(k_at + token * p.k_row), chunk, exists);
      if constexpr (v_dim == dim) {
        chunks_of_kv::copy(at + plan.block_bytes, v + words_of(v_at + token * p.v_row), chunk,
                           exists);
      } else if (chunk < value_layout::chunks) {
        chunks_of_value::copy(to + plan.block_bytes + value_layout::offset(row, chunk),
                              v + v_at + token * p.v_row, chunk, exists);
      }
    }
  }

  // Soft cap and bias.
  __device__ __forceinline__ void transform(scores& s, const attention_tile& tile, int block,
                                            const score_scaling<form>& scaling) const {
    if constexpr (form.softcap) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
        for (int j = 0; j < bn / 8; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s[m][j][i] = scaling.cap(s[m][j][i]);
        }
      }
    }
    if constexpr (form.bias) {
      const T* const bias = static_cast<const T*>(p.bias) + tile.sequence.index * p.bias_batch +
                            tile.head * p.bias_head;
      const int first = block * bn + lane() % 4 * 2;
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row =
              smaller(tile.first_row + own_row(m, half), larger(tile.sequence.q_len - 1, 0));
          const T* const from = bias + static_cast<i64>(row) * p.bias_row + first;
#pragma unroll
          for (int j = 0; j < bn / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const bool exists = first + j * 8 + e < tile.sequence.kv_len;
              float& score = s[m][j][half * 2 + e];
              score = scaling.add_bias(score, exists ? to_float(from[j * 8 + e]) : 0.0f);
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ void apply_mask(scores& s, const attention_tile& tile,
                                             int block) const {
    const int start = block * bn + lane() % 4 * 2;
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = tile.first_row + own_row(m, half);
        const key_range keys = keys_of_row<form>(p, tile.sequence, row);
        const int first = keys.first - start, last = keys.last - start;
        [[maybe_unused]] u32 words[ceil_div(bn, 32)] = {};
        if constexpr (packed) {
          const packed_mask mask(p, tile.sequence.index, tile.head);
          const u32* const bits = mask.row_bits(smaller(row, p.q_len - 1), block * bn);
#pragma unroll
          for (int w = 0; w < bn / 32; ++w) words[w] = bits[w] >> (lane() % 4 * 2);
        }
#pragma unroll
        for (int j = 0; j < bn / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            bool visible = j * 8 + e < last;
            if constexpr (form.window) visible = visible && j * 8 + e >= first;
            if constexpr (packed) visible = visible && (words[j / 4] >> (j % 4 * 8 + e) & 1) != 0;
            if (!visible) s[m][j][half * 2 + e] = minus_infinity();
          }
        }
      }
    }
  }

  // Accumulators go through the warp's own rows of shared memory, so that 16 bytes are stored at a
  // time.
  __device__ __forceinline__ void store(const attention_tile& tile, const typename sums::output& o,
                                        const mma_softmax<m_tiles>& softmax) const {
    const float sink = form.sinks ? p.sinks[tile.head] : minus_infinity();
    __syncwarp();
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const softmax_result result = finish_softmax(softmax.whole(m, half), sink);
        const int row = own_row(m, half);
        if constexpr (form.lse) {
          if (lane() % 4 == 0 && tile.first_row + row < tile.sequence.q_len) {
            tile_rows{p, tile}.store_lse(row, result);
          }
        }
        if constexpr (form.e4m3) {
          const int quad = lane() % 4;
#pragma unroll
          for (int group = 0; group < value_layout::chunks / 2; ++group) {
            const float4 from = sums::columns_of(o[m], group, half);
            const u32 to = shared + value_layout::offset(row, 2 * group + quad / 2) + quad % 2 * 8;
            store_shared_word(to, pack<T>(from.x * result.factor, from.y * result.factor));
            store_shared_word(to + 4, pack<T>(from.z * result.factor, from.w * result.factor));
          }
        } else {
#pragma unroll
          for (int block = 0; block < value_layout::chunks; ++block) {
            const float(&from)[4] = o[m][block];
            store_shared_word(
                shared + value_layout::offset(row, block) + lane() % 4 * 4,
                pack<T>(from[half * 2] * result.factor, from[half * 2 + 1] * result.factor));
          }
        }
      }
    }
    __syncwarp();
    T* const out = static_cast<T*>(p.out) + tile.head * v_dim;
    constexpr int chunks = chunks_of_value::count;
#pragma unroll 4
    for (int index = lane(); index < warp_rows * chunks; index += 32) {
      const int row = warp() * warp_rows + index / chunks, chunk = index % chunks;
      if (tile.first_row + row < tile.sequence.q_len) {
        chunks_of_value::store(tile_rows{p, tile}.at(out, row, p.out_batch, p.out_row), chunk,
                               load_shared(shared + value_layout::offset(row, chunk)));
      }
    }
  }

 public:
  __device__ __forceinline__ sm80_attention(const attention_params& params, u32 shared_memory)
      : p(params), shared(shared_memory) {}

  __device__ __forceinline__ void run(const attention_cache_params* cache = nullptr) const {
    const u32 q_fragment =
        shared + warp() * warp_rows * layout::pitch + layout::row_fragment(lane());
    const u32 k_fragment = kv_layout::key_fragment(lane());
    const u32 v_fragment = plan.block_bytes + v_layout::row_fragment(lane());
    score_scaling<form> scaling(p);
    for (scheduler work(p); work.is_valid(); work.next()) {
      const attention_tile tile = work.tile();
      if constexpr (form.e4m3) {
        scaling = score_scaling<form>(p);
        scaling.scale_keys(k_scale_of<form>(cache, tile.head / (p.heads / p.kv_heads)));
      }
      walk loads(p, tile, 0), keys(p, tile, 0);
      int load_slot = 0, slot = 0;
      const auto load_next = [&] {
        if (loads.is_valid()) {
          load_block(tile, loads.block(), load_slot);
          loads.next(p, tile, 0);
        }
        copy_async_commit();  // a group also where there is no block, so that waits can count them
        load_slot = load_slot + 1 == stages ? 0 : load_slot + 1;
      };
      if constexpr (form.e4m3) {
        load_q_words(tile);
      } else {
        tile_rows{p, tile}.template load_q<layout, bm, threads>(shared);
      }
#pragma unroll
      for (int stage = 0; stage < stages - 1; ++stage) load_next();

      typename queries::fragments q = {};
      typename sums::output o = {};
      mma_softmax<m_tiles> softmax;
      for (bool first = true; keys.is_valid(); first = false, keys.next(p, tile, 0)) {
        copy_async_wait<stages - 2>();
        __syncthreads();
        load_next();
        if constexpr (plan.q_in_registers) {
          if (first) queries::load_q(q, q_fragment);
        }
        const u32 here = shared + plan.stages_at + slot * plan.stage_bytes;
        slot = slot + 1 == stages ? 0 : slot + 1;
        scores s;
        products::template multiply_keys<bn, plan.q_in_registers>(s, q, q_fragment,
                                                                  here + k_fragment);
        transform(s, tile, keys.block(), scaling);
        if (keys.masked()) apply_mask(s, tile, keys.block());
        softmax.update(s, o, scaling.factor());
        sums::template multiply_values<bn>(o, s, here + v_fragment);
      }
      if constexpr (form.e4m3) {
        const float v_scale = v_scale_of<form>(cache, tile.head / (p.heads / p.kv_heads));
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
          for (int block = 0; block < queries::o_blocks; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i) o[m][block][i] *= v_scale;
          }
        }
      }
      copy_async_wait<0>();
      __syncthreads();  // a tile without keys: nobody still loads Q
      store(tile, o, softmax);
      __syncthreads();  // shared memory is read
    }
  }
};

template <attention_form form, attention_sm80_config config>
__global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
    attention_sm80_forward(const __grid_constant__ attention_params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  wait_and_launch_dependents();
  sm80_attention<form, form.dim, config>(p, shared_address(shared_memory)).run();
}

template <attention_form form, int v_dim, attention_sm80_config config>
__global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
    attention_sm80_forward_values(const __grid_constant__ attention_params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  wait_and_launch_dependents();
  sm80_attention<form, v_dim, config>(p, shared_address(shared_memory)).run();
}

template <attention_form form, attention_sm80_config config>
__global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
    attention_sm80_forward_e4m3(const __grid_constant__ attention_cache_params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  wait_and_launch_dependents();
  sm80_attention<form, form.dim, config>(p.attention, shared_address(shared_memory)).run(&p);
}

}  // namespace fftune
