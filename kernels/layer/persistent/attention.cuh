// Attention in the persistent form: heads are normalised and rotated, new keys and values go to the
// caches, a CTA attends to its split of a sequence's keys, and all CTAs combine the splits.
//
// The softmax and the mask are not those of attention/. Here a warp has heads as columns of the MMA
// and keys as rows, so a row of scores is a column of accumulators. The parts of a row meet in
// memory that is polled.
//
// attend() and combine() are long, because their steps share a thread's scores and sums.
#pragma once

#include "attention/softmax.cuh"
#include "common/mma.cuh"
#include "gemm/head_row.cuh"
#include "layer/persistent/cta.cuh"

namespace fftune {

template <class T, persistent_config c>
struct persistent_attention {
  using layout = persistent_cta<T, c>;
  const layout& cta;
  typename layout::pipeline& pipeline;
  static constexpr int rotary_pairs = c.rotary / 64;  // pairs of a head that a lane has
  static constexpr float minus_infinity = layout::minus_infinity;
  // The score of a key that a query does not see. It is finite with several tokens of a sequence:
  // some of them may see no key of a split, and the weight of that part is then exactly zero.
  static constexpr float unseen = c.per_sequence > 1 ? -1e30f : minus_infinity;
  // Kept across layers, because the cleaner's fences leave nothing in L1.
  int first_part = 0;    // First part of the results of this CTA's keys.
  int parts_of_row = 0;  // Parts of the sequence whose features this thread combines.

  // This lane's weights of the norms of heads of q and k.
  struct own_norms {
    u32 bits[c.head_norms ? 2 : 1][c.dim / 32];
  };
  // Heads of q, and of the new k and v, normalised, rotated and rounded, to shared memory. The
  // heads of the sequence's tokens are shared out among the warps.
  __device__ __forceinline__ void prepare_heads(const persistent_layer_pointers& of,
                                                const float* qkv) const {
    // Loaded before the words are waited for, as none is in L2.
    own_norms norms;
    if constexpr (c.head_norms) {
#pragma unroll
      for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int j = 0; j < c.dim / 32; ++j)
          norms.bits[part][j] =
              load_ahead(static_cast<const T*>(of.head_norms[part]) + threadIdx.x % 32 + j * 32);
    }
    constexpr int all = c.own_heads() + 2 * c.own_kv_heads(), total = c.per_sequence * all;
    constexpr int most = c.prepared_at_once(), values = c.dim / 32;
    const int lane = threadIdx.x % 32;
    const float* const from = qkv + static_cast<i64>(cta.first_token()) * c.qkv_rows() + lane;
    int first = threadIdx.x / 32;
    asm volatile("" : "+r"(first));  // or the rows of heads are in registers for all layers
#pragma unroll 1
    for (; first < total; first += most * c.warps) {
      u32 raw[most][values];
      const auto is_needed = [&](int i) {
        const int at = first + i * c.warps;
        return at < total && (at % all < c.own_heads() || cta.has_new(at / all));
      };
#pragma unroll
      for (int i = 0; i < most; ++i)
#pragma unroll
        for (int j = 0; j < values; ++j) raw[i][j] = is_needed(i) ? 0 : 1;
      int spins = 0;
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int i = 0; i < most; ++i)
#pragma unroll
          for (int j = 0; j < values; ++j)
            if (raw[i][j] == 0)
              raw[i][j] = load_relaxed_word(from + row_of_head(first + i * c.warps) + j * 32);
#pragma unroll
        for (int i = 0; i < most; ++i)
#pragma unroll
          for (int j = 0; j < values; ++j) missing = missing || raw[i][j] == 0;
        count_spin(spins);
      } while (missing);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < most; ++i)
        if (is_needed(i))
          prepare_head(norms, (first + i * c.warps) / all, (first + i * c.warps) % all, raw[i]);
    }
  }

  static __device__ __forceinline__ int part_of_head(int head) {
    return head < c.own_heads() ? 0 : head < c.own_heads() + c.own_kv_heads() ? 1 : 2;
  }
  // Where head `at` of those of the sequence's tokens begins among their rows of q, k and v.
  __device__ __forceinline__ int row_of_head(int at) const {
    constexpr int all = c.own_heads() + 2 * c.own_kv_heads();
    const int head = at % all, part = part_of_head(head);
    const int in_part = part == 0 ? head : head - c.own_heads() - (part - 1) * c.own_kv_heads();
    return at / all * c.qkv_rows() + cta.first_of(part) +
           (cta.head_group * (part == 0 ? c.own_heads() : c.own_kv_heads()) + in_part) * c.dim;
  }

  // One of the heads of the sequence's token `token`, from the words that are polled.
  __device__ __forceinline__ void prepare_head(const own_norms& norms, int token, int head,
                                               const u32 (&raw)[c.dim / 32]) const {
    constexpr int values = c.dim / 32;
    const int lane = threadIdx.x % 32;
    float value[values];
#pragma unroll
    for (int j = 0; j < values; ++j) value[j] = __uint_as_float(~raw[j]);
    const int part = part_of_head(head);
    if constexpr (c.head_norms) {
      if (part < 2) {
        float squares = 0;
#pragma unroll
        for (int j = 0; j < values; ++j) squares += value[j] * value[j];
#pragma unroll
        for (int other = 16; other > 0; other /= 2) squares += __shfl_xor_sync(~0u, squares, other);
        const float r = rsqrtf(squares / c.dim + cta.p.epsilon);
#pragma unroll
        for (int j = 0; j < values; ++j) {
          const u32 bits = part == 0 ? norms.bits[0][j] : norms.bits[1][j];
          value[j] *= r * (cta.p.norm_offset + half_of<T>(bits));
        }
      }
    }
    if constexpr (c.rotates) {
      if (part < 2) {
#pragma unroll
        for (int j = 0; j < rotary_pairs; ++j) {
          const float2 turn = read_value<float2>(cta.shared + c.turns_at() +
                                                 (token * (c.rotary / 2) + lane + j * 32) * 8);
          const float low = value[j], high = value[j + rotary_pairs];
          value[j] = low * turn.x - high * turn.y;
          value[j + rotary_pairs] = high * turn.x + low * turn.y;
        }
      }
    }
    const u32 to =
        cta.shared + lane * 2 +
        (part == 0
             ? c.queries_at() + (token * c.own_heads() + head) * c.query_stride()
             : c.new_rows_at() + (token * 2 * c.own_kv_heads() + head - c.own_heads()) * c.dim * 2);
#pragma unroll
    for (int j = 0; j < values; ++j) write_value(to + j * 64, from_float<T>(value[j]));
  }

  // Rows of the new tokens in the caches, their cosines and sines, and the parts of each sequence:
  // once for all layers.
  __device__ __forceinline__ void read_once() {
    if (cta.keys > 0) {
      const int thread = static_cast<int>(threadIdx.x);
      if (thread < c.per_sequence) {
        const int token = cta.first_token() + thread;
        i64 slot;
        if constexpr (c.has_head())
          slot = cta.slot_of(token);
        else
          slot = c.wide_slots ? static_cast<const i64*>(cta.p.slots)[token]
                              : static_cast<const int*>(cta.p.slots)[token];
        if (slot >= cta.p.cache_rows) slot = -1;
        write_value(cta.shared + c.slots_at() + thread * 8, slot);
      }
      if constexpr (c.rotates) {
        constexpr int pairs = c.rotary / 2;
        for (int at = thread; at < c.per_sequence * pairs; at += c.consumers()) {
          const int token = cta.first_token() + at / pairs;
          const int position = c.has_head() ? cta.length_of(token) - 1 : cta.p.positions[token];
          const float2 turn = turn_of<head_rotation::halves, float>(
              {&position, cta.p.angles, cta.p.table_rows, cta.p.angle_scale}, cta.p.frequencies, 0,
              at % pairs, pairs);
          write_value(cta.shared + c.turns_at() + at * 8, turn);
        }
      }
      first_part = cta.split * parts_of_split(cta.keys_of_split(cta.length_of(cta.sequence)));
    }
    const int place = static_cast<int>(threadIdx.x) % c.unit_threads();
    if (place >= cta.rows_of_block(c.units(), 1)) return;
    const int length =
        cta.length_of((cta.first_row(c.units(), 1) + place) / (c.per_sequence * (c.q_rows() / 4)));
    const int each = cta.keys_of_split(length), seen = length - c.first_seen(length);
    const int splits = ceil_div(seen, each);
    parts_of_row = (splits - 1) * parts_of_split(each) +
                   smaller(c.groups(), ceil_div(seen - (splits - 1) * each, 16));
  }

  // Puts this warp's head of new keys (`of` 0) or values (1) into the rows of the stage of `block`,
  // and of the cache.
  __device__ __forceinline__ void place_new(u32 stage, u32 stride, int block, int of, void* cache,
                                            int kv_head) const {
    const int lane = threadIdx.x % 32, end = smaller(c.per_sequence, cta.keys - cta.first_new);
#pragma unroll 1
    for (int token = larger(0, 16 * block - cta.first_new); token < end; ++token) {
      const int row = cta.first_new + token - 16 * block;
      if (row >= 16) break;
      if (lane < c.dim / 8) {
        const int at = kv_head * c.dim + lane * 8;
        const vector16 value = read_shared(cta.shared + c.new_rows_at() +
                                           ((token * 2 + of) * c.own_kv_rows() + at) * 2);
        write_shared(stage + row * stride + at * 2, value);
        const i64 slot = read_value<i64>(cta.shared + c.slots_at() + token * 8);
        if (slot >= 0)
          store(static_cast<T*>(cache) + slot * c.cache_row() +
                    (cta.head_group * c.own_kv_heads() + kv_head) * c.kv_head + lane * 8,
                value);
      }
    }
    __syncwarp();
  }

  // Attention of this CTA's keys. Every warp goes through all stages, and computes those of its
  // group.
  __device__ __forceinline__ void attend(const persistent_layer_pointers& of, float* partial,
                                         float* logs) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
    const int kv_head = warp % c.own_kv_heads(), group = warp / c.own_kv_heads();
    const int blocks = ceil_div(cta.keys, 16);
    constexpr int steps = c.dim / 32, tiles = c.dim / 16, query_tiles = c.query_tiles();
    constexpr int queries = c.per_sequence * c.group_heads();
    const auto query_at = [&](int tile) {
      const int query = tile * 8 + row;
      const int head = query / c.group_heads() * c.own_heads() + kv_head * c.group_heads() +
                       query % c.group_heads();
      return cta.shared + c.queries_at() + head * c.query_stride() + pair * 16;
    };
    float out[query_tiles][tiles][4] = {}, total[query_tiles][2] = {}, most[query_tiles][2];
#pragma unroll
    for (int tile = 0; tile < query_tiles; ++tile) most[tile][0] = most[tile][1] = minus_infinity;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      const bool own = block % c.groups() == group, last = block == blocks - 1;
      const int there = cta.keys - 16 * block;  // rows of the stages
      const bool places = cta.first_new < smaller(cta.keys, 16 * block + 16);
      const bool writes = own && (places || there < 16);
      float weight[query_tiles][4];
      pipeline.wait();
      if (own) {
        const u32 keys_at = pipeline.buffer();
        if (places) place_new(keys_at, layout::key_stride, block, 0, of.keys, kv_head);
        float score[query_tiles][2][4] = {};
        const u32 at = keys_at + row * layout::key_stride + (kv_head * c.dim + pair * 8) * 2;
#pragma unroll
        for (int i = 0; i < steps; ++i) {
          const vector16 low = read_shared(at + i * 64);
          const vector16 high = read_shared(at + i * 64 + 8 * layout::key_stride);
#pragma unroll
          for (int tile = 0; tile < query_tiles; ++tile) {
            vector16 query = {};
            if (tile * 8 + row < queries) query = read_shared(query_at(tile) + i * 64);
#pragma unroll
            for (int half = 0; half < 2; ++half)
              mma_pairs<T>(score[tile][half], low.word, high.word, query.word, 2 * half);
          }
        }
#pragma unroll
        for (int tile = 0; tile < query_tiles; ++tile) {
#pragma unroll
          for (int column = 0; column < 2; ++column) {
            int seen = there;
            if constexpr (c.per_sequence > 1)
              seen = smaller(there, cta.first_new + 1 - 16 * block +
                                        (tile * 8 + 2 * pair + column) / c.group_heads());
#pragma unroll
            for (int i = column; i < 4; i += 2) {
              const int key = row + (i < 2 ? 0 : 8);
              bool is_seen = key < seen;
              if constexpr (c.window > 0)
                is_seen = is_seen &&
                          key + 16 * block > cta.first_query - c.window +
                                                 (tile * 8 + 2 * pair + column) / c.group_heads();
              float sum = score[tile][0][i] + score[tile][1][i];
              if constexpr (c.caps_scores) sum = tanh_by_exp2(sum * cta.p.inner_scale);
              weight[tile][i] = is_seen ? sum * cta.p.scale : unseen;
            }
            float now = fmaxf(weight[tile][column], weight[tile][column + 2]);
#pragma unroll
            for (int other = 4; other < 32; other *= 2)
              now = fmaxf(now, __shfl_xor_sync(~0u, now, other));
            now = fmaxf(now, most[tile][column]);
            const float factor = approximate_exp2(most[tile][column] - now);
            most[tile][column] = now;
            weight[tile][column] = approximate_exp2(weight[tile][column] - now);
            weight[tile][column + 2] = approximate_exp2(weight[tile][column + 2] - now);
            total[tile][column] =
                total[tile][column] * factor + weight[tile][column] + weight[tile][column + 2];
#pragma unroll
            for (int features = 0; features < tiles; ++features) {
              out[tile][features][column] *= factor;
              out[tile][features][column + 2] *= factor;
            }
          }
        }
        if (writes) async_proxy_fence();
      }
      pipeline.release();
      pipeline.wait();
      if (own) {
        const u32 values_at = pipeline.buffer();
        if (places) place_new(values_at, layout::value_stride, block, 1, of.values, kv_head);
        if (last) {
          // Rows of an earlier stage behind the values may be NaN, and a weight of 0 would keep it.
#pragma unroll 1
          for (int at_row = there; at_row < 16; ++at_row)
            if (lane < c.dim / 8)
              write_shared(
                  values_at + at_row * layout::value_stride + (kv_head * c.dim + lane * 8) * 2,
                  vector16{});
          __syncwarp();
        }
        u32 b[query_tiles][2];
#pragma unroll
        for (int tile = 0; tile < query_tiles; ++tile) {
          b[tile][0] = transposed_matrix(pack<T>(weight[tile][0], weight[tile][1]));
          b[tile][1] = transposed_matrix(pack<T>(weight[tile][2], weight[tile][3]));
        }
        const u32 values = values_at + (lane % 8 + lane / 16 * 8) * layout::value_stride +
                           (kv_head * c.dim + lane / 8 % 2 * 8) * 2;
#pragma unroll
        for (int features = 0; features < tiles; ++features) {
          u32 a[4];
          load_matrices_transposed(a[0], a[1], a[2], a[3], values + features * 32);
#pragma unroll
          for (int tile = 0; tile < query_tiles; ++tile)
            mma_16x8x16<T>(out[tile][features], a, b[tile]);
        }
        if (writes) async_proxy_fence();
      }
      pipeline.release();
    }
    if (group >= blocks) return;
#pragma unroll
    for (int tile = 0; tile < query_tiles; ++tile) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float all = total[tile][column];
#pragma unroll
        for (int other = 4; other < 32; other *= 2) all += __shfl_xor_sync(~0u, all, other);
        const int query = tile * 8 + 2 * pair + column;
        if (query >= queries) continue;
        const int head =
            cta.head_group * c.own_heads() + kv_head * c.group_heads() + query % c.group_heads();
        const i64 part_row =
            static_cast<i64>(cta.first_token() + query / c.group_heads()) * c.parts(cta.p.cache) +
            first_part + group;
        const float factor = 1.0f / all;
        if (row == 0)
          store_relaxed(logs + part_row * c.heads + head, most[tile][column] + log2f(all));
        float* const to = partial + part_row * c.q_rows() + head * c.dim + row;
#pragma unroll
        for (int features = 0; features < tiles; ++features) {
          store_relaxed(to + features * 16, out[tile][features][column] * factor);
          store_relaxed(to + features * 16 + 8, out[tile][features][column + 2] * factor);
        }
      }
    }
  }
  static __device__ __forceinline__ int parts_of_split(int split_keys) {
    return smaller(c.groups(), ceil_div(split_keys, 16));
  }

  // Sinks of the heads of the features that this thread stores. No sink is in L2, so they are
  // loaded before the thread waits for q, k and v.
  struct own_sinks {
    float of[c.own_features()] = {};
  };
  __device__ __forceinline__ own_sinks load_sinks(const float* of) const {
    own_sinks sinks;
    if constexpr (!c.sinks) return sinks;
    const int first = cta.first_row(c.units(), 1) * 4, count = cta.rows_of_block(c.units(), 1) * 4;
#pragma unroll
    for (int i = 0; i < c.own_features(); ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * c.consumers();
      if (at < count) sinks.of[i] = of[(first + at) % c.q_rows() / c.dim];
    }
    return sinks;
  }

  // Combines the parts of this CTA's share of the features of all heads. A sink joins the softmax
  // without a value.
  __device__ __forceinline__ void combine(const float* partial, const float* logs,
                                          const own_sinks& sinks, T* to) const {
    constexpr int places = c.unit_threads(), sharers = c.consumers() / places;
    constexpr int batch = c.tokens > 2 ? 8 : 4;
    constexpr int units_of_token = c.q_rows() / 4;
    const int place = threadIdx.x % places, sharer = threadIdx.x / places;
    const int first = cta.first_row(c.units(), 1), count = cta.rows_of_block(c.units(), 1);
    const int unit = first + place, row = unit / units_of_token;
    const int feature = unit % units_of_token * 4, head = feature / c.dim;
    float most = minus_infinity, total = 0;
    float sum[4] = {};
    if (place < count) {
      const i64 row_of_parts = static_cast<i64>(row) * c.parts(cta.p.cache);
      const float* const values = partial + row_of_parts * c.q_rows() + feature;
      const float* const logs_at = logs + row_of_parts * c.heads + head;
#pragma unroll 1
      for (int part = sharer; part < parts_of_row; part += batch * sharers) {
        vector16 value[batch];
        u32 log[batch];
        int spins = 0;
        bool missing;
        do {
          missing = false;
#pragma unroll
          for (int i = 0; i < batch; ++i) {
            const i64 at = part + i * sharers;
            value[i] = {~0u, ~0u, ~0u, ~0u};
            log[i] = ~__float_as_uint(minus_infinity);
            if (at >= parts_of_row) continue;
            value[i] = load_relaxed(values + at * c.q_rows());
            log[i] = load_relaxed_word(logs_at + at * c.heads);
          }
#pragma unroll
          for (int i = 0; i < batch; ++i)
            missing = missing || log[i] == 0 || value[i].word[0] == 0 || value[i].word[1] == 0 ||
                      value[i].word[2] == 0 || value[i].word[3] == 0;
          count_spin(spins);
        } while (missing);
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          const float now = __uint_as_float(~log[i]), larger_one = fmaxf(most, now);
          const float old = approximate_exp2(most - larger_one);
          const float fresh = approximate_exp2(now - larger_one);
          most = larger_one;
          total = total * old + fresh;
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sum[j] = sum[j] * old + __uint_as_float(~value[i].word[j]) * fresh;
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int other = places; other < 32; other *= 2) {
      const float other_most = __shfl_xor_sync(~0u, most, other);
      const float larger_one = fmaxf(most, other_most);
      const bool none = larger_one == minus_infinity;
      const float old = none ? 0 : approximate_exp2(most - larger_one);
      const float fresh = none ? 0 : approximate_exp2(other_most - larger_one);
      most = larger_one;
      total = total * old + __shfl_xor_sync(~0u, total, other) * fresh;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        sum[j] = sum[j] * old + __shfl_xor_sync(~0u, sum[j], other) * fresh;
    }
    constexpr int rows = c.combined_rows();
    const u32 sums_at = cta.shared + c.combine_at(), most_at = sums_at + rows * places * 16;
    const u32 totals_at = most_at + rows * places * 4;
    const int own = places <= 32 ? threadIdx.x / 32 : sharer;
    if (places > 32 || threadIdx.x % 32 < places) {
      const int at = own * places + place;
      write_shared(sums_at + at * 16, {__float_as_uint(sum[0]), __float_as_uint(sum[1]),
                                       __float_as_uint(sum[2]), __float_as_uint(sum[3])});
      write_value(most_at + at * 4, most);
      write_value(totals_at + at * 4, total);
    }
    cta.sync_consumers();
#pragma unroll(c.sinks ? c.own_features() : 1)
    for (int i = 0; i < c.own_features(); ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * c.consumers();
      if (at >= 4 * count) break;
      float of[rows], all_most = minus_infinity;
      if constexpr (c.sinks) {
        constexpr float log2_of_e = 1.4426950408889634f;
        all_most = sinks.of[i] * log2_of_e;
      }
      const float of_sink = all_most;
#pragma unroll
      for (int part = 0; part < rows; ++part) {
        of[part] = read_value<float>(most_at + (part * places + at / 4) * 4);
        all_most = fmaxf(all_most, of[part]);
      }
      float all_total = c.sinks ? approximate_exp2(of_sink - all_most) : 0, value = 0;
#pragma unroll
      for (int part = 0; part < rows; ++part) {
        const int from = part * places + at / 4;
        const float factor = approximate_exp2(of[part] - all_most);
        all_total += factor * read_value<float>(totals_at + from * 4);
        value += factor * read_value<float>(sums_at + from * 16 + at % 4 * 4);
      }
      // A query that sees no key has none of these: zero, as in PyTorch.
      const float result = all_most <= 0.5f * -1e30f ? 0.0f : value / all_total;
      store_relaxed(to + static_cast<i64>(first) * 4 + at, from_float<T>(result));
    }
  }
};

}  // namespace fftune
