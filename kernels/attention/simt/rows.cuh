// Common parts of the simt attention kernels: where rows of the tensors are, which pairs of a query
// and a key are allowed, and products of rows with one key, or query, a lane.
#pragma once

#include "attention/mask.cuh"
#include "attention/simt/config.cuh"
#include "attention/softmax.cuh"
#include "common/numerics.cuh"

namespace fftune {

// Heads of v and out have v_dim features.
template <attention_form form, int v_dim>
struct simt_rows {
  using T = element_type<form.type>;
  using C = typename choose_type<form.e4m3, fp8, T>::type;  // of k and v
  // Columns of a lane of a row of `features`: lane, lane + 32, ...
  template <int features>
  using lane_columns = float[ceil_div(features, 32)];
  using key_columns = lane_columns<form.dim>;
  using value_columns = lane_columns<v_dim>;

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ i64 warp_of_grid() {
    return static_cast<i64>(blockIdx.x) * attention_simt_config::warps + threadIdx.x / 32;
  }

  // A token of a tensor of queries or keys: its sequence, and its place there.
  struct token {
    attention_sequence sequence;
    int place;
    bool is_valid;
  };

  // Token number `index` of all queries, or of all keys.
  static __device__ __forceinline__ token find(const attention_params& p, int index, bool of_keys) {
    if constexpr (form.packed_sequences()) {
      const int* const offsets = of_keys ? p.kv_offsets : p.offsets;
      int first = 0, last = p.batch;  // the sequence is one of [first, last)
      while (last - first > 1) {
        const int middle = (first + last) / 2;
        if (offsets[middle] <= index) {
          first = middle;
        } else {
          last = middle;
        }
      }
      const attention_sequence sequence = sequence_of<form>(p, first);
      const int place = index - (of_keys ? sequence.kv_first : sequence.q_first);
      const int length = of_keys ? sequence.kv_len : sequence.q_len;
      return {sequence, place, place >= 0 && place < length};
    } else {
      const int length = of_keys ? p.kv_len : p.q_len;
      return {sequence_of<form>(p, index / length), index % length, true};
    }
  }

  // The work of a warp of a kernel of queries: a query of a head, and the keys and values of the
  // head.
  struct query_of_head {
    bool is_valid = false;
    int head;
    attention_sequence sequence;
    int place;  // in the sequence
    const C* k;
    const C* v;
  };
  static __device__ __forceinline__ query_of_head own_query(const attention_params& p) {
    const i64 item = warp_of_grid();
    const int tokens = form.packed_sequences() ? p.q_len : p.batch * p.q_len;
    if (item >= static_cast<i64>(tokens) * p.heads) return {};
    const token query = find(p, static_cast<int>(item / p.heads), false);
    const int head = static_cast<int>(item % p.heads);
    const int kv_head = head / (p.heads / p.kv_heads);
    return {query.is_valid,
            head,
            query.sequence,
            query.place,
            static_cast<const C*>(p.k) + kv_head * p.kv_head,
            static_cast<const C*>(p.v) + kv_head * (v_dim == form.dim ? p.kv_head : v_dim)};
  }

  // Element offset of a query's row of heads.
  static __device__ __forceinline__ i64 query_at(const attention_sequence& sequence, int query,
                                                 i64 batch_stride, int row_stride) {
    return static_cast<i64>(sequence.q_first + query) * row_stride +
           (form.packed_sequences() ? 0 : sequence.index * batch_stride);
  }
  // The same of a key's; negative where its page is not in the cache, so that it is all zeros.
  static __device__ __forceinline__ i64 key_at(const attention_params& p,
                                               const attention_sequence& sequence, int key,
                                               i64 batch_stride, int row_stride) {
    if constexpr (form.paged) {
      const int page = page_table(p, sequence.index)[key / p.page];
      if (!has_page(p, page)) return -1;
      return (static_cast<i64>(page) * p.page + key % p.page) * row_stride;
    } else {
      return static_cast<i64>(sequence.kv_first + key) * row_stride +
             (form.packed_sequences() ? 0 : sequence.index * batch_stride);
    }
  }
  // Place of a value of lse and delta.
  static __device__ __forceinline__ i64 statistic_at(const attention_params& p,
                                                     const attention_sequence& sequence, int query,
                                                     int head) {
    const i64 matrix =
        form.packed_sequences() ? head : static_cast<i64>(sequence.index) * p.heads + head;
    return matrix * p.q_len + sequence.q_first + query;
  }

  static __device__ __forceinline__ bool allowed(const attention_params& p,
                                                 const attention_sequence& sequence, int head,
                                                 int query, int key) {
    const key_range keys = keys_of_row<form>(p, sequence, query);
    if (key < keys.first || key >= keys.last) return false;
    if constexpr (form.mask == attention_mask::packed) {
      const packed_mask mask(p, sequence.index, head);
      return (*mask.row_bits(query, key / 32 * 32) >> (key % 32) & 1) != 0;
    }
    return true;
  }

  struct scaled_score {
    float power;  // of two
    float slope;  // of the soft cap
  };
  static __device__ __forceinline__ scaled_score scale(const attention_params& p,
                                                       const score_scaling<form>& scaling,
                                                       const attention_sequence& sequence, int head,
                                                       int query, int key, float product) {
    const float capped = scaling.cap(product);
    const float slope = form.softcap ? 1.0f - capped * capped : 1.0f;
    if constexpr (form.bias) {
      const T* const bias = static_cast<const T*>(p.bias) + sequence.index * p.bias_batch +
                            head * p.bias_head + static_cast<i64>(query) * p.bias_row;
      return {scaling.add_bias(capped, to_float(bias[key])), slope};
    }
    return {capped * scaling.factor(), slope};
  }

  // Copies a row to shared memory as floats, for products with it.
  template <int features>
  static __device__ __forceinline__ void stage(float (&to)[features], const T* from) {
    __syncwarp();
    for (int column = lane(); column < features; column += 32) to[column] = to_float(from[column]);
    __syncwarp();
  }

  // The product of a staged row and a lane's own row.
  template <int features, class Element>
  static __device__ __forceinline__ float product(const float (&staged)[features],
                                                  const Element* row) {
    float sum = 0;
#pragma unroll 8
    for (int column = 0; column < features; ++column) sum += staged[column] * to_float(row[column]);
    return sum;
  }

  // The same of a key's row, where key_at() has it.
  static __device__ __forceinline__ float key_product(const float (&staged)[form.dim], const C* k,
                                                      i64 at) {
    if constexpr (form.paged) {
      if (at < 0) return 0;
    }
    return product(staged, k + at);
  }

  // Adds a row, which all lanes share, times a factor.
  template <int features, class Element>
  static __device__ __forceinline__ void add_row(float (&sum)[ceil_div(features, 32)], float factor,
                                                 const Element* row) {
#pragma unroll
    for (int i = 0; i < ceil_div(features, 32); ++i) {
      const int column = i * 32 + lane();
      if (features % 32 == 0 || column < features) sum[i] += factor * to_float(row[column]);
    }
  }

  template <int features>
  static __device__ __forceinline__ void store_row(T* row,
                                                   const float (&values)[ceil_div(features, 32)],
                                                   float factor) {
#pragma unroll
    for (int i = 0; i < ceil_div(features, 32); ++i) {
      const int column = i * 32 + lane();
      if (features % 32 == 0 || column < features) row[column] = from_float<T>(values[i] * factor);
    }
  }

  static __device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(~0u, value, distance);
    }
    return value;
  }
  static __device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
    }
    return value;
  }
};

}  // namespace fftune
