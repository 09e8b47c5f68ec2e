// Probabilities times values, and what becomes of a tile's sums: they are stored, exchanged, kept
// for the next chunk, or left to attention_chunk_sums_sm90.
#pragma once

#include "attention/sm90/forward_cta.cuh"
#include "common/mma.cuh"
#include "common/numerics.cuh"
#include "common/wgmma_widths.cuh"

namespace fftune {

template <class Traits>
struct attention_output {
  using cta_type = attention_cta<Traits>;
  static constexpr attention_form form = Traits::form;
  static constexpr int v_dim = Traits::v_dim;
  static constexpr attention_sm90_config config = Traits::config;
  static constexpr attention_sm90_plan plan = Traits::plan;
  static constexpr int bn = config.bn, chunk = config.chunk, packed_heads = config.packed_heads;
  static constexpr int part_queries = plan.part_queries;
  static constexpr bool splits = config.split_keys, divided = config.divided;
  using T = typename cta_type::T;
  using exchange_slot = typename cta_type::exchange_slot;
  using out_accumulators = typename cta_type::out_accumulators;
  using probabilities = typename cta_type::probabilities;
  using tile_rows = typename cta_type::tile_rows;

  cta_type cta;

  __device__ __forceinline__ void issue_values(out_accumulators& out, const probabilities& from,
                                               u32 v, int accumulate) const {
    constexpr int row_bytes = plan.value_row_bytes;
    const u64 v_rows = wgmma_swizzled_descriptor<row_bytes, bn * row_bytes>(v);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < bn / 16; ++step) {
      wgmma_of_width<T, plan.out_columns, true>(
          out, from[step], wgmma_advance(v_rows, step * 16 * row_bytes), step > 0 ? 1 : accumulate);
    }
    wgmma_commit();
  }

  // Overwrites with zeros what a block of values has from key `count` on. Each MMA warpgroup that
  // reads it does, so that it need not wait for another: they write the same.
  __device__ __forceinline__ void zero_fill(u32 v, int count) const {
    constexpr int row_bytes = plan.value_row_bytes, vectors_row = row_bytes / 16;
    const int vectors = (bn - count) * vectors_row;  // of a slab
    for (int i = threadIdx.x % 128; i < plan.value_slabs * vectors; i += 128) {
      const int slab = i / vectors;
      store_shared(v + slab * bn * row_bytes + count * row_bytes + (i - slab * vectors) * 16,
                   make_float4(0, 0, 0, 0));
    }
    async_proxy_fence();
    named_barrier_sync(static_cast<int>(attention_barrier::zero_fill) + cta.warpgroup_of_thread(),
                       128);
  }
  __device__ __forceinline__ void zero_foreign(const attention_tile& tile, u32 v, int block) const {
    // Boxes of heads take the tokens of all sequences one after the other.
    if constexpr (form.foreign_keys() || plan.head_boxes) {
      const int count = tile.sequence.kv_len - block * bn;
      if (count < bn) zero_fill(v, splits ? larger(0, count) : count);
    }
  }

  // Where one of a thread's rows is stored; null if the sequence has no such row, or the part none.
  __device__ __forceinline__ T* out_row(const attention_tile& tile, int first_query, int i) const {
    const int row = cta.query_of(first_query, i);
    if (row < 0 || row >= tile.sequence.q_len) return nullptr;
    if (64 % packed_heads != 0 && cta.own_row() + i * 8 >= part_queries * packed_heads)
      return nullptr;
    T* const out = static_cast<T*>(cta.params.out) + cta.head_of(tile, i) * v_dim;
    const i64 in_tensor = tile.sequence.q_first + row;
    return out + in_tensor * cta.params.out_row +
           (form.packed_sequences() ? 0 : tile.sequence.index * cta.params.out_batch);
  }
  __device__ __forceinline__ void store_lse(const attention_tile& tile, int first_query, int i,
                                            float power) const {
    if constexpr (form.lse) {
      const int head = cta.head_of(tile, i);
      const i64 matrix = form.packed_sequences()
                             ? head
                             : static_cast<i64>(tile.sequence.index) * cta.params.heads + head;
      cta.params
          .lse[matrix * cta.params.q_len + tile.sequence.q_first + cta.query_of(first_query, i)] =
          power * natural_log_of_2;
    }
  }

  // The logit of one of a thread's rows that joins the denominator.
  __device__ __forceinline__ float sink_of(const attention_tile& tile, int i) const {
    return form.sinks ? cta.params.sinks[cta.head_of(tile, i)] : minus_infinity();
  }

  // Values of one of a thread's two rows: pairs of neighbouring columns, 8 columns apart.
  // Those of 32 columns are stored together: behind the last one are zeros.
  static constexpr int row_parts = (plan.out_columns + 31) / 32;
  using row_values = float[row_parts * 8];
  static constexpr bool stores_all = v_dim == row_parts * 32 * plan.column_parts;
  static __device__ __forceinline__ float value_of(const out_accumulators& out, int i, int at) {
    const int number = at / 2 * 4 + i * 2 + at % 2;
    return number < plan.out_registers ? out[number] : 0.0f;
  }
  // Four of a row's values, as they are kept in shared memory.
  static constexpr int row_vectors = (v_dim + 15) / 16;
  static __device__ __forceinline__ void clear_behind(row_values& sums) {
#pragma unroll
    for (int at = row_vectors * 4; at < row_parts * 8; ++at) sums[at] = 0.0f;
  }

  // split_keys: gives the other MMA warpgroup one of a thread's rows, and adds to the other row
  // what that one has of it.
  __device__ __forceinline__ softmax_row exchange(const out_accumulators& out, tile_rows& rows,
                                                  row_values& sums) const {
    const int warpgroup = cta.warpgroup_of_thread(), thread = threadIdx.x % 128;
    const bool second = warpgroup != 0;
    exchange_slot to = cta.exchange_from(warpgroup), from = cta.exchange_from(1 - warpgroup);
    to.phase = from.phase = rows.exchange_phase;
    rows.exchange_phase ^= 1;
    const u32 given = to.buffer(), taken = from.buffer();
    constexpr int vectors = row_vectors, row_at = vectors * 128 * 16;
    to.wait_empty();
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      float vector[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float low = value_of(out, 0, i * 4 + j), high = value_of(out, 1, i * 4 + j);
        vector[j] = second ? low : high;
        sums[i * 4 + j] = second ? high : low;
      }
      store_shared(given + (i * 128 + thread) * 16,
                   make_float4(vector[0], vector[1], vector[2], vector[3]));
    }
    const softmax_row low = rows.softmax[0], high = rows.softmax[1];
    softmax_row own = second ? high : low;
    store_shared(given + row_at + thread * 8,
                 second ? float2{low.reference, low.sum} : float2{high.reference, high.sum});
    barrier_arrive(to.full_barrier());
    from.wait_full();
    const float2 pair = load_shared_pair(taken + row_at + thread * 8);
    softmax_row other{pair.x, pair.y};
    const float own_factor = own.rescale(other.reference);
    const float other_factor = other.rescale(own.reference);
    own.sum += other.sum;
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const float4 vector = load_shared(taken + (i * 128 + thread) * 16);
      const float values[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& sum = sums[i * 4 + j];
        sum = sum * own_factor + values[j] * other_factor;
      }
    }
    barrier_arrive(from.empty_barrier());
    clear_behind(sums);
    return own;
  }

  // Stores 8 columns of a row from `column` on, which its head may not all have. Heads are aligned
  // to no more than their features are.
  static __device__ __forceinline__ void store_columns(T* row, int column, const u32 (&word)[4]) {
    constexpr int bytes = attention_access_bytes(v_dim);
    T* const to = row + column;
    if constexpr (bytes == 16) {
      if (stores_all || column < v_dim) {
        *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    } else if constexpr (bytes == 8) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        if (column + i * 2 < v_dim) {
          *reinterpret_cast<uint2*>(to + i * 2) = make_uint2(word[i], word[i + 1]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column + i * 2 < v_dim) *reinterpret_cast<u32*>(to + i * 2) = word[i];
      }
    }
  }

  // Four threads have neighbouring pairs of columns of a row. They exchange, so that each has 8
  // neighbouring columns of 32 and stores 16 bytes.
  __device__ __forceinline__ void store_row(const row_values& sums, softmax_row total,
                                            const attention_tile& tile, int first_query, int i,
                                            int first_column = 0) const {
    const int quarter = threadIdx.x % 4;
    total.sum += __shfl_xor_sync(~0u, total.sum, 1);
    total.sum += __shfl_xor_sync(~0u, total.sum, 2);
    const softmax_result result = finish_softmax(total, sink_of(tile, i));
    T* const to = out_row(tile, first_query, i);
    if (to != nullptr && quarter == 0 && first_column == 0)
      store_lse(tile, first_query, i, result.lse);
#pragma unroll
    for (int part = 0; part < row_parts; ++part) {
      u32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = part * 8 + j * 2;
        word[j] = pack<T>(sums[at] * result.factor, sums[at + 1] * result.factor);
      }
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        const bool upper = (quarter & step) != 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if ((j & step) != 0) continue;
          const u32 sent = upper ? word[j] : word[j + step];
          const u32 received = __shfl_xor_sync(~0u, sent, step);
          if (upper) {
            word[j] = received;
          } else {
            word[j + step] = received;
          }
        }
      }
      if (to != nullptr) store_columns(to, first_column + part * 32 + quarter * 8, word);
    }
  }

  // divided: leaves what a thread has of its two rows for attention_chunk_sums_sm90.
  __device__ __forceinline__ void leave(const out_accumulators& out, const attention_work& tile,
                                        const tile_rows& rows) const {
    const int first_query = cta.own_first_query(tile), quarter = threadIdx.x % 4;
    const i64 queries = static_cast<i64>(cta.params.batch) * cta.params.q_len;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (out_row(tile, first_query, i) == nullptr) continue;
      const i64 query =
          static_cast<i64>(tile.sequence.index) * cta.params.q_len + cta.query_of(first_query, i);
      float* const to = reinterpret_cast<float*>(cta.params.partials) +
                        ((tile.chunk * queries + query) * cta.params.heads + cta.head_of(tile, i)) *
                            attention_chunk_row(form);
#pragma unroll
      for (int at = 0; at < plan.out_columns / 4; at += 2) {
        *reinterpret_cast<float2*>(to + at / 2 * 8 + cta.own_column()) =
            float2{value_of(out, i, at), value_of(out, i, at + 1)};
      }
      to[plan.out_columns + quarter] = rows.softmax[i].sum;
      to[plan.out_columns + 4 + quarter] = rows.softmax[i].reference;
    }
  }

  // Chunks: adds what a thread has of row i to its sums over those before.
  __device__ __forceinline__ void add_up(const out_accumulators& out, tile_rows& rows, int i,
                                         bool is_first, bool is_last, row_values& sums) const {
    softmax_row& all = rows.of_chunks[i];
    if (is_first) all = {};
    const chunk_factors by = chunk_factors_of(all.reference, rows.softmax[i].reference);
    all.sum = add_chunk(all.sum, rows.softmax[i].sum, by);
    constexpr int vectors = row_vectors;
#pragma unroll
    for (int vector = 0; vector < vectors; ++vector) {
      const u32 place = cta.base + plan.sums_at + cta.warpgroup_of_thread() * plan.sums_bytes +
                        ((i * vectors + vector) * 128 + threadIdx.x % 128) * 16;
      float4 four = make_float4(0, 0, 0, 0);
      if (!is_first) four = load_shared(place);
      const float before[4] = {four.x, four.y, four.z, four.w};
      float* const now = sums + vector * 4;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        now[j] = add_chunk(before[j], value_of(out, i, vector * 4 + j), by);
      }
      if (!is_last) store_shared(place, make_float4(now[0], now[1], now[2], now[3]));
    }
    clear_behind(sums);
  }

  __device__ __forceinline__ void store(const out_accumulators& out, const attention_work& tile,
                                        tile_rows& rows) const {
    if constexpr (divided) {
      leave(out, tile, rows);
      return;
    }
    const int first_query = cta.own_first_query(tile);
    row_values sums;
    if constexpr (chunk > 0) {
      const auto chunks = cta.chunks_of(tile);
      const bool is_first = tile.chunk == chunks.last, is_last = tile.chunk == chunks.first;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        add_up(out, rows, i, is_first, is_last, sums);
        if (is_last) store_row(sums, rows.of_chunks[i], tile, first_query, i);
      }
    } else if constexpr (splits) {
      const softmax_row total = exchange(out, rows, sums);
      store_row(sums, total, tile, first_query, cta.warpgroup_of_thread());
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int at = 0; at < row_parts * 8; ++at) sums[at] = value_of(out, i, at);
        store_row(sums, rows.softmax[i], tile, first_query, i);
      }
    }
  }

  // A tile whose rows see no key.
  __device__ __forceinline__ void store_empty(const attention_tile& tile) const {
    if (splits && cta.warpgroup_of_thread() != 0) return;
    const int quarter = threadIdx.x % 4, first_query = cta.own_first_query(tile);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      T* const to = out_row(tile, first_query, i);
      if (to == nullptr) continue;
      if (quarter == 0) store_lse(tile, first_query, i, sink_of(tile, i) * log2_e);
#pragma unroll
      for (int part = 0; part < row_parts; ++part) {
        store_columns(to, part * 32 + quarter * 8, {0, 0, 0, 0});
      }
    }
  }
};

}  // namespace fftune
