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

// Heads of v, out and d_out have v_dim features, as many as those of q and k or fewer.
template <attention_form form, int v_dim, attention_sm80_backward_config config>
class sm80_attention_backward {
  using T = element_type<form.type>;
  static constexpr attention_sm80_backward_plan plan =
      attention_sm80_backward_plan_of(form, v_dim, config);
  static constexpr int dim = form.dim, rows = config.rows(), block = config.block;
  static constexpr int stages = config.stages, threads = config.threads();
  static constexpr bool packed = form.mask == attention_mask::packed;
  // Rows of q and k, and rows of v and d_out.
  template <int features>
  struct rows_of {
    using products = mma_tile<T, features, 1>;
    using layout = attention_row_layout<features>;
    using chunks = row_chunks<T, features>;
    using gradient = typename products::output;
  };
  using of_keys = rows_of<dim>;
  using of_values = rows_of<v_dim>;
  using scores = float[1][block / 8][4];
  static_assert(!form.paged && stages >= 2 && block % 16 == 0 && v_dim <= dim);

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
  template <class Of, int count>
  static __device__ __forceinline__ void load_rows(u32 to, const T* from, int stride, int exist) {
    using layout = typename Of::layout;
    constexpr int copies = count * layout::chunks;
#pragma unroll
    for (int copy = 0; copy < ceil_div(copies, threads); ++copy) {
      const int index = copy * threads + static_cast<int>(threadIdx.x);
      if (copies % threads != 0 && index >= copies) break;
      const int row = index / layout::chunks, chunk = index % layout::chunks;
      Of::chunks::copy(to + layout::offset(row, chunk), from + static_cast<i64>(row) * stride,
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
    return static_cast<const T*>(p.d_out) + head * v_dim +
           token_at(sequence, sequence.q_first + row, params.d_out_batch, params.d_out_row);
  }
  __device__ __forceinline__ const T* keys(const attention_sequence& sequence, int kv_head,
                                           int key) const {
    return static_cast<const T*>(p.k) + kv_head * dim +
           token_at(sequence, sequence.kv_first + key, p.k_batch, p.k_row);
  }
  __device__ __forceinline__ const T* values(const attention_sequence& sequence, int kv_head,
                                             int key) const {
    return static_cast<const T*>(p.v) + kv_head * v_dim +
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
  template <class Of>
  static __device__ __forceinline__ void store(const typename Of::gradient& from, float factor,
                                               u32 at, T* to, int stride, int exist) {
    using layout = typename Of::layout;
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
    constexpr int chunks = Of::chunks::count;
#pragma unroll 4
    for (int index = lane(); index < 16 * chunks; index += 32) {
      const int row = index / chunks, chunk = index % chunks;
      if (row < exist) {
        Of::chunks::store(to + static_cast<i64>(row) * stride, chunk,
                          load_shared(at + layout::offset(row, chunk)));
      }
    }
    __syncwarp();
  }

  // Statistics of this thread's two rows, and the keys that they see.
  struct row_statistics {
    float lse[2], delta[2] = {};
    key_range visible[2];
  };
  // Loads those of the warp's rows from `first_row` on. `gradients`: the rows' d_out in shared
  // memory.
  __device__ __forceinline__ void load_statistics(row_statistics& of, const attention_tile& tile,
                                                  u32 gradients, int first_row) const {
    using value_layout = typename of_values::layout;
    const attention_sequence& sequence = tile.sequence;
    for (int row = 0; row < 16 && first_row + row < sequence.q_len; ++row) {
      const T* const out =
          static_cast<const T*>(p.out) + tile.head * v_dim +
          token_at(sequence, sequence.q_first + first_row + row, p.out_batch, p.out_row);
      float sum = 0;
      if (lane() < of_values::chunks::count) {
        const vector16 of_out = of_values::chunks::load(out, lane());
        const float4 of_gradient = load_shared(gradients + value_layout::offset(row, lane()));
        const u32 d_words[4] = {__float_as_uint(of_gradient.x), __float_as_uint(of_gradient.y),
                                __float_as_uint(of_gradient.z), __float_as_uint(of_gradient.w)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float first, second, d_first, d_second;
          unpack<T>(of_out.word[i], first, second);
          unpack<T>(d_words[i], d_first, d_second);
          sum += first * d_first + second * d_second;
        }
      }
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(~0u, sum, distance);
      }
      if (lane() == 0) p.delta[statistic_at(sequence, tile.head, first_row + row)] = sum;
      if (row == lane() / 4) of.delta[0] = sum;
      if (row == lane() / 4 + 8) of.delta[1] = sum;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8 + lane() / 4;
      of.visible[half] = keys_of_row<form>(p, sequence, row);
      of.lse[half] = row < sequence.q_len ? p.lse[statistic_at(sequence, tile.head, row)] * log2_e
                                          : plus_infinity();
      if (of.lse[half] == minus_infinity()) of.lse[half] = plus_infinity();  // probabilities of 0
    }
  }

  // dp = the gradients of the scores s of a block of keys.
  __device__ __forceinline__ void differentiate(const scores& s, scores& dp,
                                                const attention_tile& tile,
                                                const row_statistics& of, int first_row, int key,
                                                bool masked,
                                                const score_scaling<form>& scaling) const {
    const attention_sequence& sequence = tile.sequence;
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
          bool allowed = !masked || (key + column >= of.visible[half].first &&
                                     key + column < of.visible[half].last);
          if constexpr (packed) {
            allowed = allowed && (!masked || (words[column / 32] >> column % 32 & 1) != 0);
          }
          const float probability = allowed
                                        ? approximate_exp2(power * scaling.factor() - of.lse[half])
                                        : masked_probability;
          dp[0][j][i] = score_gradient(probability, (dp[0][j][i] - of.delta[half]) * slope(capped));
        }
      }
    }
  }

  // The blocks of queries of each head that a causal mask and a window leave to some of the keys
  // of a CTA. Blocks whose flag is empty are left out.
  class query_walk {
    const attention_params& p_;
    const attention_sequence& sequence_;
    int first_key_, first_block_, blocks_, last_head_;

   public:
    int head, block, flag = 0;

    // `exist`: keys of the sequence from `first_key` on.
    __device__ __forceinline__ query_walk(const attention_params& p,
                                          const attention_sequence& sequence, int kv_head,
                                          int first_key, int exist)
        : p_(p), sequence_(sequence), first_key_(first_key) {
      int first_query = 0, last_query = exist > 0 ? sequence.q_len : 0;
      if constexpr (form.mask == attention_mask::causal) {
        first_query = larger(first_query, first_key - sequence.shift());
      }
      if constexpr (form.window) {
        const int last_key = smaller(first_key + rows, sequence.kv_len) - 1;
        last_query = smaller(last_query, last_key - sequence.shift() + p.window);
      }
      first_block_ = first_query / sm80_attention_backward::block;
      blocks_ =
          larger(ceil_div(larger(last_query, 0), sm80_attention_backward::block) - first_block_, 0);
      const int heads = p.heads / p.kv_heads;
      last_head_ = (kv_head + 1) * heads;
      head = kv_head * heads;
      block = first_block_ - 1;
      next();
    }
    __device__ __forceinline__ bool is_valid() const { return head >= 0; }
    __device__ __forceinline__ void next() {
      for (;;) {
        if (++block >= first_block_ + blocks_) {
          block = first_block_;
          ++head;
        }
        if (blocks_ == 0 || head >= last_head_) {
          head = -1;
          return;
        }
        flag = tile_mixed;
        if constexpr (packed) {
          const packed_mask mask(p_, sequence_.index, head);
          flag = mask.template flag<attention_flag_tile, attention_flag_tile>(
              block * sm80_attention_backward::block / attention_flag_tile * attention_flag_tile,
              first_key_);
        }
        if (flag != tile_empty) return;
      }
    }
  };

  // The statistics of a block of queries, small, so by way of registers: the barrier before their
  // use orders them.
  __device__ __forceinline__ void store_statistics(const attention_sequence& sequence, int head,
                                                   int row, int slot) const {
    if (threadIdx.x < block) {
      const int query = row + static_cast<int>(threadIdx.x);
      float lse = plus_infinity(), delta = 0;
      if (query < sequence.q_len) {
        const i64 at = statistic_at(sequence, head, query);
        lse = p.lse[at] * log2_e;
        delta = p.delta[at];
        if (lse == minus_infinity()) lse = plus_infinity();  // probabilities of 0
      }
      const u32 statistics = shared + plan.statistics_at + (slot * 2 * block + threadIdx.x) * 4;
      store_shared(statistics, lse);
      store_shared(statistics + block * 4, delta);
    }
  }

  using slopes_of_scores = float[1][form.softcap ? block / 8 : 1][4];

  // s = the probabilities of the scores s of a block of queries, from `first` on.
  __device__ __forceinline__ void exponentiate(scores& s, slopes_of_scores& slopes,
                                               const attention_sequence& sequence, int head,
                                               int first, int first_key, bool masked,
                                               u32 statistics,
                                               const score_scaling<form>& scaling) const {
    // The block's queries that exist. The zeros of the others meet infinite keys and values.
    const int exist_here = sequence.q_len - first;
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
            const packed_mask mask(p, sequence.index, head);
            const int own_keys = first_key + warp() * 16;
            word = *mask.row_bits(smaller(query, p.q_len - 1), own_keys / 32 * 32) >> own_keys % 32;
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
            power = scaling.add_bias(power, bias(sequence, head, query, key));
          }
          bool allowed = !masked || (key >= visible.first && key < visible.last);
          if constexpr (packed) allowed = allowed && (!masked || (word >> row & 1) != 0);
          allowed = allowed && column < exist_here;
          s[0][j][i] =
              allowed ? approximate_exp2(power * scaling.factor() - lse) : masked_probability;
        }
      }
    }
  }

  // Accumulators of keys beyond the `exist` ones of the sequence are of probabilities of zeros.
  static __device__ __forceinline__ void clear_beyond(typename of_keys::gradient& dk,
                                                      typename of_values::gradient& dv, int exist) {
    using layout = typename of_keys::layout;
    using value_layout = typename of_values::layout;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half * 8 + lane() / 4 < exist) continue;
#pragma unroll
      for (int column = 0; column < layout::chunks; ++column) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          dk[0][column][half * 2 + e] = 0;
          if (column < value_layout::chunks) dv[0][column][half * 2 + e] = 0;
        }
      }
    }
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
    using layout = typename of_keys::layout;
    using value_layout = typename of_values::layout;
    using products = typename of_keys::products;
    using value_products = typename of_values::products;
    const u32 own = shared + warp() * 16 * layout::pitch;
    const u32 own_values =
        own + plan.tile_bytes - warp() * 16 * (layout::pitch - value_layout::pitch);
    const u32 q_fragment = own + layout::row_fragment(lane());
    const u32 do_fragment = v_dim == dim ? q_fragment + plan.tile_bytes
                                         : own_values + value_layout::row_fragment(lane());
    const score_scaling<form> scaling(p);

    for (scheduler work(p); work.is_valid(); work.next()) {
      const attention_tile tile = work.tile();
      const attention_sequence& sequence = tile.sequence;
      const int kv_head = tile.head / (p.heads / p.kv_heads);
      const int exist = sequence.q_len - tile.first_row;
      load_rows<of_keys, rows>(shared, queries(sequence, tile.head, tile.first_row), p.q_row,
                               exist);
      load_rows<of_values, rows>(shared + plan.tile_bytes,
                                 out_gradients(sequence, tile.head, tile.first_row),
                                 params.d_out_row, exist);

      // A block of the walk has `parts` steps.
      walk loads(p, tile, 0), steps(p, tile, 0);
      int load_part = 0, load_slot = 0, part = 0, slot = 0;
      const auto load_next = [&] {
        if (loads.is_valid()) {
          const int key = loads.block() * walk_block + load_part * block;
          const u32 to = shared + plan.stages_at + load_slot * plan.stage_bytes;
          load_rows<of_keys, block>(to, keys(sequence, kv_head, key), p.k_row,
                                    sequence.kv_len - key);
          load_rows<of_values, block>(to + plan.block_bytes, values(sequence, kv_head, key),
                                      p.v_row, sequence.kv_len - key);
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

      const int first_row = tile.first_row + warp() * 16;
      row_statistics of_rows;
      load_statistics(of_rows, tile, own_values, first_row);

      typename of_keys::gradient sum = {};
      typename products::fragments none = {};
      typename value_products::fragments no_values = {};
      while (steps.is_valid()) {
        copy_async_wait<stages - 2>();
        __syncthreads();
        load_next();
        const u32 here = shared + plan.stages_at + slot * plan.stage_bytes;
        slot = slot + 1 == stages ? 0 : slot + 1;
        const int key = steps.block() * walk_block + part * block;
        scores s, dp;
        products::template multiply_keys<block, false>(s, none, q_fragment,
                                                       here + layout::key_fragment(lane()));
        value_products::template multiply_keys<block, false>(
            dp, no_values, do_fragment,
            here + plan.block_bytes + value_layout::key_fragment(lane()));
        const bool masked = steps.masked();
        differentiate(s, dp, tile, of_rows, first_row, key, masked, scaling);
        products::template multiply_values<block>(sum, dp, here + layout::row_fragment(lane()));
        if (++part == parts) {
          part = 0;
          steps.next(p, tile, 0);
        }
      }
      copy_async_wait<0>();
      __syncthreads();
      store<of_keys>(
          sum, p.scale, own,
          static_cast<T*>(p.dq) + tile.head * dim +
              token_at(sequence, sequence.q_first + first_row, params.dq_batch, params.dq_row),
          params.dq_row, sequence.q_len - first_row);
      __syncthreads();  // shared memory is read
    }
  }

  __device__ __forceinline__ void dkv() const {
    if constexpr (plan.splits_dkv) {
      const int kv_head = static_cast<int>(blockIdx.y) / 2;
      if (blockIdx.y % 2 == 0) {
        dkv<true, false>(kv_head);
      } else {
        dkv<false, true>(kv_head);
      }
    } else {
      dkv<true, true>(static_cast<int>(blockIdx.y));
    }
  }

 private:
  // Computes dk, dv, or both.
  template <bool makes_dk, bool makes_dv>
  __device__ __forceinline__ void dkv(int kv_head) const {
    const attention_sequence sequence = sequence_of<form>(p, static_cast<int>(blockIdx.z));
    const int first_key = static_cast<int>(blockIdx.x) * rows;
    // The keys of the tensor that belong to the sequence; those beyond kv_len have gradients of 0.
    const int length = form.packed_sequences() ? sequence.kv_len : p.kv_len;
    if (first_key >= length) return;

    using layout = typename of_keys::layout;
    using value_layout = typename of_values::layout;
    using products = typename of_keys::products;
    using value_products = typename of_values::products;
    const u32 own = shared + warp() * 16 * layout::pitch;
    const u32 own_values =
        own + plan.tile_bytes - warp() * 16 * (layout::pitch - value_layout::pitch);
    const u32 k_fragment = own + layout::row_fragment(lane());
    const u32 v_fragment = v_dim == dim ? k_fragment + plan.tile_bytes
                                        : own_values + value_layout::row_fragment(lane());
    const score_scaling<form> scaling(p);
    const int exist = sequence.kv_len - first_key;
    load_rows<of_keys, rows>(shared, keys(sequence, kv_head, first_key), p.k_row, exist);
    load_rows<of_values, rows>(shared + plan.tile_bytes, values(sequence, kv_head, first_key),
                               p.v_row, exist);

    query_walk loads(p, sequence, kv_head, first_key, exist), now = loads;
    int load_slot = 0, slot = 0;
    const auto load_next = [&] {
      if (loads.is_valid()) {
        const int row = loads.block * block;
        const u32 to = shared + plan.stages_at + load_slot * plan.stage_bytes;
        load_rows<of_keys, block>(to, queries(sequence, loads.head, row), p.q_row,
                                  sequence.q_len - row);
        load_rows<of_values, block>(to + plan.block_bytes, out_gradients(sequence, loads.head, row),
                                    params.d_out_row, sequence.q_len - row);
        store_statistics(sequence, loads.head, row, load_slot);
        loads.next();
      }
      copy_async_commit();
      load_slot = load_slot + 1 == stages ? 0 : load_slot + 1;
    };
#pragma unroll
    for (int stage = 0; stage < stages - 1; ++stage) load_next();

    typename of_keys::gradient dk = {};
    typename of_values::gradient dv = {};
    typename products::fragments none = {};
    typename value_products::fragments no_values = {};
    while (now.is_valid()) {
      copy_async_wait<stages - 2>();
      __syncthreads();
      load_next();
      const u32 here = shared + plan.stages_at + slot * plan.stage_bytes;
      const u32 statistics = shared + plan.statistics_at + slot * 2 * block * 4;
      slot = slot + 1 == stages ? 0 : slot + 1;
      const int first = now.block * block;  // query
      scores s;
      products::template multiply_keys<block, false>(s, none, k_fragment,
                                                     here + layout::key_fragment(lane()));
      const key_range common = common_keys<form>(p, sequence, first, first + block);
      const bool masked = first_key < common.first || first_key + rows > common.last ||
                          (packed && now.flag != tile_full);
      slopes_of_scores slopes;
      exponentiate(s, slopes, sequence, now.head, first, first_key, masked, statistics, scaling);
      if constexpr (makes_dv) {
        value_products::template multiply_values<block>(
            dv, s, here + plan.block_bytes + value_layout::row_fragment(lane()));
      }
      if constexpr (makes_dk) {
        scores dp;
        value_products::template multiply_keys<block, false>(
            dp, no_values, v_fragment,
            here + plan.block_bytes + value_layout::key_fragment(lane()));
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
      now.next();
    }
    copy_async_wait<0>();
    __syncthreads();
    const int own_first = first_key + warp() * 16;
    clear_beyond(dk, dv, sequence.kv_len - own_first);
    store_gradients<makes_dk, makes_dv>(dk, dv, sequence, kv_head, own_first, length - own_first,
                                        own);
  }

  // The first `stored` of the warp's keys from `own_first` on, by way of shared memory at `own`.
  template <bool makes_dk, bool makes_dv>
  __device__ __forceinline__ void store_gradients(const typename of_keys::gradient& dk,
                                                  const typename of_values::gradient& dv,
                                                  const attention_sequence& sequence, int kv_head,
                                                  int own_first, int stored, u32 own) const {
    if constexpr (makes_dk) {
      store<of_keys>(
          dk, p.scale, own,
          static_cast<T*>(p.dk) + kv_head * dim +
              token_at(sequence, sequence.kv_first + own_first, params.dk_batch, params.dk_row),
          params.dk_row, stored);
    }
    if constexpr (makes_dv) {
      store<of_values>(
          dv, 1.0f, own,
          static_cast<T*>(p.dv) + kv_head * v_dim +
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
  sm80_attention_backward<form, form.dim, config>(params, shared_address(shared_memory)).dq();
}

template <attention_form form, int v_dim, attention_sm80_backward_config config>
__global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
    attention_sm80_dq_values(const __grid_constant__ attention_backward_params params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  wait_and_launch_dependents();
  sm80_attention_backward<form, v_dim, config>(params, shared_address(shared_memory)).dq();
}

template <attention_form form, attention_sm80_backward_config config>
__global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
    attention_sm80_dkv(const __grid_constant__ attention_backward_params params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  wait_and_launch_dependents();
  sm80_attention_backward<form, form.dim, config>(params, shared_address(shared_memory)).dkv();
}

template <attention_form form, int v_dim, attention_sm80_backward_config config>
__global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
    attention_sm80_dkv_values(const __grid_constant__ attention_backward_params params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  wait_and_launch_dependents();
  sm80_attention_backward<form, v_dim, config>(params, shared_address(shared_memory)).dkv();
}

}  // namespace fftune
