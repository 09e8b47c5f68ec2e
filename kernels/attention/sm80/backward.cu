// The attention backward by mma.sync, for sm_80 and newer, and the same bits every time. Two
// kernels, one after the other, each with its own scores: two products more than one kernel that
// would add up dq by atomics. Head dims that are multiples of 8, and every form but pages.
//
//   attention_sm80_dq   CTA: queries of a head, 16 a warp; steps through blocks of keys
//                       S = Q K^T, dP = dO V^T, dS = P (dP - delta), dQ += dS K
//                       also stores delta = rowsum(dO O)
//   attention_sm80_dkv  CTA: keys of a kv head, 16 a warp; steps through blocks of queries of all
//                       heads that share it
//                       S^T = K Q^T, dV += P^T dO, dP^T = V dO^T, dK += dS^T Q
//
// In both, the CTA's own rows are the A operands, and the accumulators of scores become A operands
// in registers. The loaded rows of a step are used twice: as rows of the other factor of scores
// (ldmatrix), and as rows that are accumulated (ldmatrix.trans).
//
//   shared memory   the CTA's rows of two tensors, which the results pass through at the end;
//                   [stage] blocks of two tensors, and of queries their lse and delta
//   barriers        one __syncthreads a block: it has arrived for all threads, and the stage that
//                   is loaded next is free
//
// Grids: dq: as the forward (forward.cu). dkv: (ceil(kv_len / rows), kv heads x (2 where dk and dv
// are split), batch); in thd the first is that of all keys. Block: config.threads().
#include "attention/key_walk.cuh"
#include "attention/mma_tile.cuh"
#include "attention/sm80/backward_config.cuh"
#include "common/async.cuh"
#include "common/numerics.cuh"
#include "common/vectors.cuh"

namespace fftune {

template <attention_form form, attention_sm80_backward_config config>
class sm80_attention_backward {
  using T = element_type<form.type>;
  static constexpr attention_sm80_backward_plan plan =
      attention_sm80_backward_plan_of(form, config);
  static constexpr int dim = form.dim, rows = config.rows(), block = config.block;
  static constexpr int stages = config.stages, threads = config.threads();
  static constexpr bool packed = form.mask == attention_mask::packed;
  using products = mma_tile<T, dim, 1>;
  using layout = attention_row_layout<dim>;
  using chunks_of_row = row_chunks<T, dim>;
  using gradient = typename products::output;
  using scores = float[1][block / 8][4];
  static_assert(!form.paged && stages >= 2 && block % 16 == 0);

  const attention_backward_params& params;
  const attention_params& p;
  u32 shared;

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ i64 token_at(const attention_sequence& sequence, int token,
                                                 i64 batch_stride, int row_stride) {
    return static_cast<i64>(token) * row_stride +
           (form.packed_sequences() ? 0 : sequence.index * batch_stride);
  }
  static __device__ __forceinline__ float plus_infinity() { return __int_as_float(0x7f800000); }

  // Starts to load `count` rows; zeros from row `exist` on. `from` is the first row's elements.
  template <int count>
  static __device__ __forceinline__ void load_rows(u32 to, const T* from, int stride, int exist) {
    constexpr int copies = count * layout::chunks;
#pragma unroll
    for (int copy = 0; copy < ceil_div(copies, threads); ++copy) {
      const int index = copy * threads + static_cast<int>(threadIdx.x);
      if (copies % threads != 0 && index >= copies) break;
      const int row = index / layout::chunks, chunk = index % layout::chunks;
      chunks_of_row::copy(to + layout::offset(row, chunk), from + static_cast<i64>(row) * stride,
                          chunk, row < exist);
    }
  }

  __device__ __forceinline__ const T* queries(const attention_sequence& sequence, int head,
                                              int row) const {
    return static_cast<const T*>(p.q) + head * dim +
           token_at(sequence, sequence.q_first + row, p.q_batch, p.q_row);
  }
  __device__ __forceinline__ const T* out_gradients(const attention_sequence& sequence, int head,
                                                    int row) const {
    return static_cast<const T*>(p.d_out) + head * dim +
           token_at(sequence, sequence.q_first + row, params.d_out_batch, params.d_out_row);
  }
  __device__ __forceinline__ const T* keys(const attention_sequence& sequence, int kv_head,
                                           int key) const {
    return static_cast<const T*>(p.k) + kv_head * dim +
           token_at(sequence, sequence.kv_first + key, p.k_batch, p.k_row);
  }
  __device__ __forceinline__ const T* values(const attention_sequence& sequence, int kv_head,
                                             int key) const {
    return static_cast<const T*>(p.v) + kv_head * dim +
           token_at(sequence, sequence.kv_first + key, p.v_batch, p.v_row);
  }
  // Place of a value of lse and delta.
  __device__ __forceinline__ i64 statistic_at(const attention_sequence& sequence, int head,
                                              int row) const {
    const i64 matrix =
        form.packed_sequences() ? head : static_cast<i64>(sequence.index) * p.heads + head;
    return matrix * p.q_len + sequence.q_first + row;
  }

  __device__ __forceinline__ float bias(const attention_sequence& sequence, int head, int row,
                                        int key) const {
    const T* const from = static_cast<const T*>(p.bias) + sequence.index * p.bias_batch +
                          head * p.bias_head + static_cast<i64>(row) * p.bias_row;
    return row < sequence.q_len && key < sequence.kv_len ? to_float(from[key]) : 0.0f;
  }

  // Turns scores into the slopes of the soft cap, and returns powers of two.
  static __device__ __forceinline__ float slope(float capped) {
    return form.softcap ? 1.0f - capped * capped : 1.0f;
  }

  // Stores accumulators by way of the warp's own rows of shared memory at `at`, 16 bytes at a time.
  // `exist` of these rows are in the tensor, and `to` is the warp's first.
  static __device__ __forceinline__ void store(const gradient& from, float factor, u32 at, T* to,
                                               int stride, int exist) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int column = 0; column < layout::chunks; ++column) {
        store_shared_word(
            at + layout::offset(lane() / 4 + half * 8, column) + lane() % 4 * 4,
            pack<T>(from[0][column][half * 2] * factor, from[0][column][half * 2 + 1] * factor));
      }
    }
    __syncwarp();
    constexpr int chunks = chunks_of_row::count;
#pragma unroll 4
    for (int index = lane(); index < 16 * chunks; index += 32) {
      const int row = index / chunks, chunk = index % chunks;
      if (row < exist) {
        chunks_of_row::store(to + static_cast<i64>(row) * stride, chunk,
                             load_shared(at + layout::offset(row, chunk)));
      }
    }
    __syncwarp();
  }

 public:
  __device__ __forceinline__ sm80_attention_backward(const attention_backward_params& parameters,
                                                     u32 shared_memory)
      : params(parameters), p(parameters.forward), shared(shared_memory) {}

  __device__ __forceinline__ void dq() const {
    using scheduler = attention_tile_scheduler<form, rows, 1>;
    constexpr int walk_block = packed ? attention_flag_tile : block;
    constexpr int parts = walk_block / block;
    using walk = key_walk<form, rows, rows, walk_block>;
    const u32 own = shared + warp() * 16 * layout::pitch;
    const u32 q_fragment = own + layout::row_fragment(lane());
    const u32 do_fragment = q_fragment + plan.tile_bytes;
    const score_scaling<form> scaling(p);

    for (scheduler work(p); work.is_valid(); work.next()) {
      const attention_tile tile = work.tile();
      const attention_sequence& sequence = tile.sequence;
      const int kv_head = tile.head / (p.heads / p.kv_heads);
      const int exist = sequence.q_len - tile.first_row;
      load_rows<rows>(shared, queries(sequence, tile.head, tile.first_row), p.q_row, exist);
      load_rows<rows>(shared + plan.tile_bytes, out_gradients(sequence, tile.head, tile.first_row),
                      params.d_out_row, exist);

      // A block of the walk has `parts` steps.
      walk loads(p, tile, 0), steps(p, tile, 0);
      int load_part = 0, load_slot = 0, part = 0, slot = 0;
      const auto load_next = [&] {
        if (loads.is_valid()) {
          const int key = loads.block() * walk_block + load_part * block;
          const u32 to = shared + plan.stages_at + load_slot * (2 * plan.block_bytes);
          load_rows<block>(to, keys(sequence, kv_head, key), p.k_row, sequence.kv_len - key);
          load_rows<block>(to + plan.block_bytes, values(sequence, kv_head, key), p.v_row,
                           sequence.kv_len - key);
          if (++load_part == parts) {
            load_part = 0;
            loads.next(p, tile, 0);
          }
        }
        copy_async_commit();
        load_slot = load_slot + 1 == stages ? 0 : load_slot + 1;
      };
#pragma unroll
      for (int stage = 0; stage < stages - 1; ++stage) load_next();
      copy_async_wait<stages - 2>();
      __syncthreads();

      // Statistics of this thread's two rows.
      float lse[2], delta[2] = {};
      const int first_row = tile.first_row + warp() * 16;
      for (int row = 0; row < 16 && first_row + row < sequence.q_len; ++row) {
        const T* const out =
            static_cast<const T*>(p.out) + tile.head * dim +
            token_at(sequence, sequence.q_first + first_row + row, p.out_batch, p.out_row);
        float sum = 0;
        if (lane() < chunks_of_row::count) {
          const vector16 of_out = chunks_of_row::load(out, lane());
          const float4 of_gradient =
              load_shared(own + plan.tile_bytes + layout::offset(row, lane()));
          const u32 gradients[4] = {__float_as_uint(of_gradient.x), __float_as_uint(of_gradient.y),
                                    __float_as_uint(of_gradient.z), __float_as_uint(of_gradient.w)};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float first, second, d_first, d_second;
            unpack<T>(of_out.word[i], first, second);
            unpack<T>(gradients[i], d_first, d_second);
            sum += first * d_first + second * d_second;
          }
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
          sum += __shfl_xor_sync(~0u, sum, distance);
        }
        if (lane() == 0) p.delta[statistic_at(sequence, tile.head, first_row + row)] = sum;
        if (row == lane() / 4) delta[0] = sum;
        if (row == lane() / 4 + 8) delta[1] = sum;
      }
      key_range visible[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + half * 8 + lane() / 4;
        visible[half] = keys_of_row<form>(p, sequence, row);
        lse[half] = row < sequence.q_len ? p.lse[statistic_at(sequence, tile.head, row)] * log2_e
                                         : plus_infinity();
        if (lse[half] == minus_infinity()) lse[half] = plus_infinity();  // probabilities of 0
      }

      gradient sum = {};
      typename products::fragments none = {};
      while (steps.is_valid()) {
        copy_async_wait<stages - 2>();
        __syncthreads();
        load_next();
        const u32 here = shared + plan.stages_at + slot * (2 * plan.block_bytes);
        slot = slot + 1 == stages ? 0 : slot + 1;
        const int key = steps.block() * walk_block + part * block;
        scores s, dp;
        products::template multiply_keys<block, false>(s, none, q_fragment,
                                                       here + layout::key_fragment(lane()));
        products::template multiply_keys<block, false>(
            dp, none, do_fragment, here + plan.block_bytes + layout::key_fragment(lane()));
        const bool masked = steps.masked();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first_row + half * 8 + lane() / 4;
          [[maybe_unused]] u32 words[ceil_div(block, 32)] = {};
          if constexpr (packed) {
            const packed_mask mask(p, sequence.index, tile.head);
            const u32* const bits = mask.row_bits(smaller(row, p.q_len - 1), key / 32 * 32);
#pragma unroll
            for (int w = 0; w < ceil_div(block, 32); ++w) words[w] = bits[w] >> key % 32;
          }
#pragma unroll
          for (int j = 0; j < block / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int i = half * 2 + e, column = j * 8 + lane() % 4 * 2 + e;
              const float capped = scaling.cap(s[0][j][i]);
              float power = capped;
              if constexpr (form.bias) {
                power = scaling.add_bias(power, bias(sequence, tile.head, row, key + column));
              }
              bool allowed = !masked || (key + column >= visible[half].first &&
                                         key + column < visible[half].last);
              if constexpr (packed) {
                allowed = allowed && (!masked || (words[column / 32] >> column % 32 & 1) != 0);
              }
              const float probability = allowed
                                            ? approximate_exp2(power * scaling.factor() - lse[half])
                                            : masked_probability;
              dp[0][j][i] =
                  score_gradient(probability, (dp[0][j][i] - delta[half]) * slope(capped));
            }
          }
        }
        products::template multiply_values<block>(sum, dp, here + layout::row_fragment(lane()));
        if (++part == parts) {
          part = 0;
          steps.next(p, tile, 0);
        }
      }
      copy_async_wait<0>();
      __syncthreads();
      store(sum, p.scale, own,
            static_cast<T*>(p.dq) + tile.head * dim +
                token_at(sequence, sequence.q_first + first_row, params.dq_batch, params.dq_row),
            params.dq_row, sequence.q_len - first_row);
      __syncthreads();  // shared memory is read
    }
  }

  // Computes dk, dv, or both.
  template <bool makes_dk, bool makes_dv>
  __device__ __forceinline__ void dkv(int kv_head) const {
    const attention_sequence sequence = sequence_of<form>(p, static_cast<int>(blockIdx.z));
    const int first_key = static_cast<int>(blockIdx.x) * rows;
    // The keys of the tensor that belong to the sequence; those beyond kv_len have gradients of 0.
    const int length = form.packed_sequences() ? sequence.kv_len : p.kv_len;
    if (first_key >= length) return;

    const u32 own = shared + warp() * 16 * layout::pitch;
    const u32 k_fragment = own + layout::row_fragment(lane());
    const u32 v_fragment = k_fragment + plan.tile_bytes;
    const score_scaling<form> scaling(p);
    const int exist = sequence.kv_len - first_key;
    load_rows<rows>(shared, keys(sequence, kv_head, first_key), p.k_row, exist);
    load_rows<rows>(shared + plan.tile_bytes, values(sequence, kv_head, first_key), p.v_row, exist);

    // The blocks of queries that a causal mask and a window leave to some of the keys.
    int first_query = 0, last_query = exist > 0 ? sequence.q_len : 0;
    if constexpr (form.mask == attention_mask::causal) {
      first_query = larger(first_query, first_key - sequence.shift());
    }
    if constexpr (form.window) {
      const int last_key = smaller(first_key + rows, sequence.kv_len) - 1;
      last_query = smaller(last_query, last_key - sequence.shift() + p.window);
    }
    const int first_block = first_query / block;
    const int blocks = larger(ceil_div(larger(last_query, 0), block) - first_block, 0);
    const int heads = p.heads / p.kv_heads;

    // A step: a block of queries of a head. Blocks whose flag is empty are left out.
    struct step {
      int head, block, flag;
    };
    const auto next_step = [&](step& at) {
      for (;;) {
        if (++at.block >= first_block + blocks) {
          at.block = first_block;
          ++at.head;
        }
        if (blocks == 0 || at.head >= (kv_head + 1) * heads) {
          at.head = -1;
          return;
        }
        at.flag = tile_mixed;
        if constexpr (packed) {
          const packed_mask mask(p, sequence.index, at.head);
          at.flag = mask.template flag<attention_flag_tile, attention_flag_tile>(
              at.block * block / attention_flag_tile * attention_flag_tile, first_key);
        }
        if (at.flag != tile_empty) return;
      }
    };
    step loads{kv_head * heads, first_block - 1, 0}, now = loads;
    next_step(loads);
    next_step(now);
    int load_slot = 0, slot = 0;
    const auto load_next = [&] {
      if (loads.head >= 0) {
        const int row = loads.block * block;
        const u32 to = shared + plan.stages_at + load_slot * (2 * plan.block_bytes);
        load_rows<block>(to, queries(sequence, loads.head, row), p.q_row, sequence.q_len - row);
        load_rows<block>(to + plan.block_bytes, out_gradients(sequence, loads.head, row),
                         params.d_out_row, sequence.q_len - row);
        // Small, so by way of registers: the barrier before their use orders them.
        if (threadIdx.x < block) {
          const int query = row + static_cast<int>(threadIdx.x);
          float lse = plus_infinity(), delta = 0;
          if (query < sequence.q_len) {
            const i64 at = statistic_at(sequence, loads.head, query);
            lse = p.lse[at] * log2_e;
            delta = p.delta[at];
            if (lse == minus_infinity()) lse = plus_infinity();  // probabilities of 0
          }
          const u32 statistics =
              shared + plan.statistics_at + (load_slot * 2 * block + threadIdx.x) * 4;
          store_shared(statistics, lse);
          store_shared(statistics + block * 4, delta);
        }
        next_step(loads);
      }
      copy_async_commit();
      load_slot = load_slot + 1 == stages ? 0 : load_slot + 1;
    };
#pragma unroll
    for (int stage = 0; stage < stages - 1; ++stage) load_next();

    gradient dk = {}, dv = {};
    typename products::fragments none = {};
    while (now.head >= 0) {
      copy_async_wait<stages - 2>();
      __syncthreads();
      load_next();
      const u32 here = shared + plan.stages_at + slot * (2 * plan.block_bytes);
      const u32 statistics = shared + plan.statistics_at + slot * 2 * block * 4;
      slot = slot + 1 == stages ? 0 : slot + 1;
      const int first = now.block * block;  // query
      // The block's queries that exist. The zeros of the others meet infinite keys and values.
      const int exist_here = sequence.q_len - first;
      scores s;
      products::template multiply_keys<block, false>(s, none, k_fragment,
                                                     here + layout::key_fragment(lane()));
      const key_range common = common_keys<form>(p, sequence, first, first + block);
      const bool masked = first_key < common.first || first_key + rows > common.last ||
                          (packed && now.flag != tile_full);
      float slopes[1][form.softcap ? block / 8 : 1][4];
#pragma unroll
      for (int j = 0; j < block / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = j * 8 + lane() % 4 * 2 + e, query = first + column;
          const float lse = load_shared_float(statistics + column * 4);
          key_range visible{};
          [[maybe_unused]] u32 word = 0;
          if (masked) {
            visible = keys_of_row<form>(p, sequence, query);
            if constexpr (packed) {
              const packed_mask mask(p, sequence.index, now.head);
              const int own_keys = first_key + warp() * 16;
              word =
                  *mask.row_bits(smaller(query, p.q_len - 1), own_keys / 32 * 32) >> own_keys % 32;
            }
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = half * 2 + e, row = half * 8 + lane() / 4;
            const int key = first_key + warp() * 16 + row;
            const float capped = scaling.cap(s[0][j][i]);
            if constexpr (form.softcap) slopes[0][j][i] = slope(capped);
            float power = capped;
            if constexpr (form.bias) {
              power = scaling.add_bias(power, bias(sequence, now.head, query, key));
            }
            bool allowed = !masked || (key >= visible.first && key < visible.last);
            if constexpr (packed) allowed = allowed && (!masked || (word >> row & 1) != 0);
            allowed = allowed && column < exist_here;
            s[0][j][i] =
                allowed ? approximate_exp2(power * scaling.factor() - lse) : masked_probability;
          }
        }
      }
      if constexpr (makes_dv) {
        products::template multiply_values<block>(
            dv, s, here + plan.block_bytes + layout::row_fragment(lane()));
      }
      if constexpr (makes_dk) {
        scores dp;
        products::template multiply_keys<block, false>(
            dp, none, v_fragment, here + plan.block_bytes + layout::key_fragment(lane()));
#pragma unroll
        for (int j = 0; j < block / 8; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int column = j * 8 + lane() % 4 * 2 + i % 2;
            const float delta = load_shared_float(statistics + (block + column) * 4);
            float difference = dp[0][j][i] - delta;
            if constexpr (form.softcap) difference *= slopes[0][j][i];
            dp[0][j][i] = score_gradient(s[0][j][i], difference);
          }
        }
        products::template multiply_values<block>(dk, dp, here + layout::row_fragment(lane()));
      }
      next_step(now);
    }
    copy_async_wait<0>();
    __syncthreads();
    // Accumulators of keys beyond the sequence's are of probabilities of zeros.
    const int own_first = first_key + warp() * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (own_first + half * 8 + lane() / 4 < sequence.kv_len) continue;
#pragma unroll
      for (int column = 0; column < layout::chunks; ++column) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          dk[0][column][half * 2 + e] = 0;
          dv[0][column][half * 2 + e] = 0;
        }
      }
    }
    const int stored = length - own_first;
    if constexpr (makes_dk) {
      store(dk, p.scale, own,
            static_cast<T*>(p.dk) + kv_head * dim +
                token_at(sequence, sequence.kv_first + own_first, params.dk_batch, params.dk_row),
            params.dk_row, stored);
    }
    if constexpr (makes_dv) {
      store(dv, 1.0f, own,
            static_cast<T*>(p.dv) + kv_head * dim +
                token_at(sequence, sequence.kv_first + own_first, params.dv_batch, params.dv_row),
            params.dv_row, stored);
    }
  }
};

template <attention_form form, attention_sm80_backward_config config>
__global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
    attention_sm80_dq(const __grid_constant__ attention_backward_params params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  wait_and_launch_dependents();
  sm80_attention_backward<form, config>(params, shared_address(shared_memory)).dq();
}

template <attention_form form, attention_sm80_backward_config config>
__global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
    attention_sm80_dkv(const __grid_constant__ attention_backward_params params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  constexpr attention_sm80_backward_plan plan = attention_sm80_backward_plan_of(form, config);
  wait_and_launch_dependents();
  const sm80_attention_backward<form, config> backward(params, shared_address(shared_memory));
  if constexpr (plan.splits_dkv) {
    const int kv_head = static_cast<int>(blockIdx.y) / 2;
    if (blockIdx.y % 2 == 0) {
      backward.template dkv<true, false>(kv_head);
    } else {
      backward.template dkv<false, true>(kv_head);
    }
  } else {
    backward.template dkv<true, true>(static_cast<int>(blockIdx.y));
  }
}

}  // namespace fftune
