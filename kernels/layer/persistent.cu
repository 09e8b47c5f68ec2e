// Whole layers in one launch, for up to 8 tokens in decoding: one CTA on each SM, for all layers.
//
// A layer of a few tokens is a stream of weights, interrupted where every CTA needs what all others
// computed. Here the stream does not stop there: one warp of a CTA copies the CTA's share of all
// weights, and of the keys and values, in a fixed order to a ring of stages in shared memory, and
// waits for nothing but free stages. The other warps multiply, and while they wait for other CTAs
// the ring fills.
//
//   warps 0 .. n-1  consumers, per layer:
//                     norm of x, q k v = rows of the product        -> qkv      [tokens, rows] f32
//                     heads' norms, rotation; new k, v -> caches; attention over a split of the keys
//                                                                   -> partial  of each split
//                     splits combined                               -> attended [tokens, q]
//                     output product + x                            -> mid      [tokens, d]
//                     norm of mid, gate and up                      -> hidden   [tokens, h]
//                     down + mid                                    -> y        [tokens, d]
//   warp n          producer: weights, keys and values -> ring (full and empty barriers)
//   warp n+1        cleaner: sets the buffers of the layer before to zero
//
// Rows of each product are split evenly among CTAs. What is written there for all others goes
// through L2 in words that tell by themselves whether they are there: the complement of the data,
// which is never zero, as no computed value is a NaN of all ones. Readers poll until no word is
// zero: one round trip, no fence and no counter. Layers use three sets of buffers in turn. While a
// CTA multiplies by gate and up, every CTA is past the layer before, so the cleaner zeroes that
// layer's set; its fence, and the chain of what is read and written until the set's next use two
// layers later, order the zeros before it.
//
// Products: mma.sync with 16 rows of weights as A, tokens as the 8 columns of B. The order of k is
// permuted so that a lane reads 16 bytes of a row at once. A stage is 16 rows by `chunk` elements of
// k; each team of warps takes a block of 16 rows and part of its chunks.
//
// All CTAs must be resident at once: the launch is cooperative. Grid: config.blocks. Block:
// config.threads(). Shared memory: config.shared_bytes(). Workspace: zeros.
#include "common/activation.cuh"
#include "common/async_copy.cuh"
#include "common/mma.cuh"
#include "common/rms_norm.cuh"
#include "common/tma.cuh"
#include "common/vector.cuh"
#include "gemm/head_row.cuh"
#include "layer/persistent.cuh"
#include "layer/persistent_memory.cuh"

namespace fftune {

__device__ __forceinline__ bool has_zero_half(u32 word) {
  return ((word - 0x00010001u) & ~word & 0x80008000u) != 0;
}
__device__ __forceinline__ bool is_missing(const vector16& halves) {
  return has_zero_half(halves.word[0]) || has_zero_half(halves.word[1]) ||
         has_zero_half(halves.word[2]) || has_zero_half(halves.word[3]);
}
__device__ __forceinline__ vector16 complement(vector16 value) {
#pragma unroll
  for (u32& word : value.word) word = ~word;
  return value;
}
// What a measurement leaves out.
struct persistent_cut {
  bool waits = false;      // for other CTAs
  bool math = false;       // the products' multiplications
  bool attention = false;  // the whole of it
};

template <class T, persistent_config c, class activation, class norm, persistent_cut cut = persistent_cut{}>
struct persistent_layers {
  static constexpr int block_rows = c.block_rows;
  static constexpr int row_stride = 2 * c.chunk + c.row_padding;
  static constexpr int key_bytes = 2 * c.kv_rows();
  static constexpr int key_stride = key_bytes + c.row_padding;
  static constexpr int value_stride = key_bytes + c.value_padding;
  static constexpr int rotary_pairs = c.dim / 64;  // pairs of a head that a lane has

  const persistent_params& p;
  const u32 full, empty, ring, input, norm_weights, sums[2], combined, queries, new_row, statistics;
  u32 counter = 0;  // stages so far
  int token, split, first_key, keys;  // this CTA's part of attention
  bool has_new;  // the last of the keys is the new token's

  __device__ __forceinline__ persistent_layers(const persistent_params& params, u32 shared)
      : p(params),
        full(shared),
        empty(shared + 8 * c.stages),
        ring(shared + c.barrier_bytes()),
        input(shared + c.input_at()),
        norm_weights(input + c.tokens * c.input_stride()),
        sums{norm_weights + 2 * c.d, norm_weights + 2 * c.d + c.sums_bytes()},
        combined(sums[1] + c.sums_bytes()),
        queries(combined + c.combine_bytes()),
        new_row(queries + c.heads * c.query_stride()),
        statistics(new_row + 4 * c.kv_rows()) {
    token = static_cast<int>(blockIdx.x) / c.splits();
    split = static_cast<int>(blockIdx.x) % c.splits();
    keys = 0;
    has_new = false;
    first_key = 0;
    if (token < c.tokens && !cut.attention) {
      const int length = p.lengths[token], each = keys_of_split(length);
      first_key = split * each;
      keys = smaller(each, length - first_key);
      if (keys < 0) keys = 0;
      has_new = keys > 0 && first_key + keys == length;
    }
  }

  static __device__ __forceinline__ int keys_of_split(int length) {
    return larger(c.least_keys, ceil_div(length, c.splits()));
  }
  static __device__ __forceinline__ int first_row(int rows) {
    return static_cast<int>(static_cast<i64>(rows) * blockIdx.x / c.blocks);
  }
  static __device__ __forceinline__ int rows_of_block(int rows) {
    return static_cast<int>(static_cast<i64>(rows) * (blockIdx.x + 1) / c.blocks) - first_row(rows);
  }
  static __device__ __forceinline__ void sync_consumers() {
    named_barrier_sync(1, c.consumers());
  }
  __device__ __forceinline__ u8* set_of(int layer) const {
    return static_cast<u8*>(p.workspace) + layer % c.copies_of_set * c.set_bytes(p.cache);
  }
  __device__ __forceinline__ void mark(int layer, int at) const {
    if (p.trace != nullptr && threadIdx.x == 0)
      p.trace[(static_cast<i64>(blockIdx.x) * p.layers + layer) * 16 + at] = clock64();
  }

  // ---- producer ----

  __device__ __forceinline__ void load_stage(const void* from, bool valid, int rows, u32 bytes,
                                             u32 stride, l2_policy policy) {
    const u32 stage = counter % c.stages, parity = counter / c.stages & 1;
    const int lane = threadIdx.x % 32;
    wait_for_stage(empty + 8 * stage, parity ^ 1);
    if (lane == 0) {
      if (rows > 0)
        barrier_arrive_expect(full + 8 * stage, rows * bytes);
      else
        barrier_arrive(full + 8 * stage);
    }
    __syncwarp();
    if (valid)
      bulk_load(ring + stage * c.stage_bytes() + lane * stride, from, bytes, full + 8 * stage,
                policy);
    ++counter;
  }

  // Row `row` of a block's 16: row_of(block, row) is its address, null past the end.
  template <int k, int of_block, class RowOf>
  __device__ __forceinline__ void load_weights(int rows, const RowOf& row_of) {
    const int blocks = ceil_div(rows, of_block), lane = threadIdx.x % 32;
    for (int first = 0; first < blocks; first += c.teams()) {
      const int many = smaller(c.teams(), blocks - first);
      for (int chunk = 0; chunk < ceil_div(k, c.chunk); ++chunk) {
        const u32 bytes = 2 * smaller(c.chunk, k - chunk * c.chunk);
        for (int block = first; block < first + many; ++block) {
          const T* from = lane < block_rows ? row_of(block, lane) : nullptr;
          const bool valid = from != nullptr;
          if (valid) from += chunk * c.chunk;
          load_stage(from, valid, __popc(__ballot_sync(~0u, valid)), bytes, row_stride,
                     l2_policy::evict_first);
        }
      }
    }
  }

  __device__ __forceinline__ void load_keys(const persistent_layer_pointers& of) {
    const int lane = threadIdx.x % 32, there = keys - (has_new ? 1 : 0);
    for (int first = 0; first < keys; first += 16) {
      const int rows = smaller(16, there - first);
      const bool valid = lane < rows;
      const i64 at = (static_cast<i64>(token) * p.cache + first_key + first + lane) * c.kv_rows();
      load_stage(static_cast<const T*>(of.keys) + at, valid, rows, key_bytes, key_stride,
                 l2_policy::evict_first);
      load_stage(static_cast<const T*>(of.values) + at, valid, rows, key_bytes, value_stride,
                 l2_policy::evict_first);
    }
  }

  __device__ __forceinline__ void produce() {
    const int qkv = first_row(c.qkv_rows()), qkv_rows = rows_of_block(c.qkv_rows());
    const int out = first_row(c.d), out_rows = rows_of_block(c.d);
    const int hidden = first_row(c.h), hidden_rows = rows_of_block(c.h);
    for (int layer = 0; layer < p.layers; ++layer) {
      const persistent_layer_pointers& of = p.of[layer];
      load_weights<c.d, 16>(qkv_rows, [&](int block, int row) -> const T* {
        int n = block * 16 + row;
        if (n >= qkv_rows) return nullptr;
        n += qkv;
        const int part = part_of(n);
        return static_cast<const T*>(of.qkv[part]) + static_cast<i64>(n - first_of(part)) * c.d;
      });
      load_keys(of);
      load_weights<c.q_rows(), 16>(out_rows, [&](int block, int row) -> const T* {
        const int n = block * 16 + row;
        return n < out_rows ? static_cast<const T*>(of.out) + static_cast<i64>(out + n) * c.q_rows()
                            : nullptr;
      });
      load_weights<c.d, 8>(hidden_rows, [&](int block, int row) -> const T* {
        const int n = block * 8 + row % 8;
        return n < hidden_rows ? static_cast<const T*>(row < 8 ? of.gate : of.up) +
                                     static_cast<i64>(hidden + n) * c.d
                               : nullptr;
      });
      load_weights<c.h, 16>(out_rows, [&](int block, int row) -> const T* {
        const int n = block * 16 + row;
        return n < out_rows ? static_cast<const T*>(of.down) + static_cast<i64>(out + n) * c.h
                            : nullptr;
      });
    }
  }

  static __device__ __forceinline__ int part_of(int n) {
    return n < c.q_rows() ? 0 : n < c.q_rows() + c.kv_rows() ? 1 : 2;
  }
  static __device__ __forceinline__ int first_of(int part) {
    return part == 0 ? 0 : c.q_rows() + (part - 1) * c.kv_rows();
  }

  // ---- cleaner ----

  __device__ __forceinline__ void clean() {
    const i64 vectors = c.set_bytes(p.cache) / 16;
    for (int layer = 0; layer < p.layers; ++layer) {
      named_barrier_sync(2, c.consumers() + 32);  // mid is there: all are past the layer before
      if (layer > 0) {
        u8* const set = set_of(layer - 1);
        const i64 end = vectors * (blockIdx.x + 1) / c.blocks;
        for (i64 at = vectors * blockIdx.x / c.blocks + threadIdx.x % 32; at < end; at += 32)
          store(set + at * 16, vector16{});
        __threadfence();
      }
      named_barrier_arrive(3, c.consumers() + 32);
    }
  }

  // ---- consumers ----

  __device__ __forceinline__ u32 stage_address(u32 number) const {
    return ring + number % c.stages * c.stage_bytes();
  }
  // Copies may complete out of order, so another team's stage before this one, in the same place,
  // may not be there yet: its barrier must not be taken for this one's.
  __device__ __forceinline__ void wait_full(u32 number) const {
    const u32 stage = number % c.stages, parity = number / c.stages & 1;
    wait_for_stage(empty + 8 * stage, parity ^ 1);
    wait_for_stage(full + 8 * stage, parity);
  }
  __device__ __forceinline__ void release(u32 number, int sharers) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      barrier_arrive(empty + 8 * (number % c.stages), c.released / sharers);
  }

  // 16 bytes at each of several places that other CTAs write, those for which there(i) holds; zeros
  // elsewhere. The first alone is polled: the others take part in traffic once it is there.
  template <int stride, int count, class There>
  static __device__ __forceinline__ void poll(vector16 (&value)[count], const T* from,
                                              const There& there) {
    int spins = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) value[i] = {~0u, ~0u, ~0u, ~0u};
    if (there(0)) {
      do {
        value[0] = load_relaxed(from);
        count_spin(spins);
      } while (!cut.waits && is_missing(value[0]));
    }
    if constexpr (count > 1) {
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int i = 1; i < count; ++i)
          if (there(i)) value[i] = load_relaxed(from + i * stride);
#pragma unroll
        for (int i = 1; i < count; ++i) missing = missing || is_missing(value[i]);
        count_spin(spins);
      } while (!cut.waits && missing);
    }
#pragma unroll
    for (int i = 0; i < count; ++i) value[i] = complement(value[i]);
  }

  // The rows of x, or of what other CTAs write, normalised in shared memory.
  __device__ __forceinline__ void normalise(const T* from, bool plain) {
    constexpr int token_places = c.tokens <= 1 ? 1 : c.tokens <= 2 ? 2 : c.tokens <= 4 ? 4 : 8;
    constexpr int lanes = c.consumers() / token_places, vectors = c.d / 8;
    constexpr int each = ceil_div(vectors, lanes);
    const int row = threadIdx.x / lanes, place = threadIdx.x % lanes;
    vector16 value[each];
    float squares = 0;
    const T* const at = from + static_cast<i64>(row) * c.d + place * 8;
    const auto there = [&](int i) { return row < c.tokens && place + i * lanes < vectors; };
    if (plain) {
#pragma unroll
      for (int i = 0; i < each; ++i)
        value[i] = there(i) ? load_dependent(at + i * lanes * 8) : vector16{};
    } else {
      poll<lanes * 8>(value, at, there);
    }
#pragma unroll
    for (int i = 0; i < each; ++i)
#pragma unroll
      for (const u32 word : value[i].word) {
        float first, second;
        unpack<T>(word, first, second);
        squares += first * first + second * second;
      }
#pragma unroll
    for (int other = 16; other > 0; other /= 2) squares += __shfl_xor_sync(~0u, squares, other);
    if (threadIdx.x % 32 == 0) write_float(statistics + threadIdx.x / 32 * 4, squares);
    copy_async_wait<0>();  // the norm's weights
    sync_consumers();
    if (row < c.tokens) {
      constexpr int warps_of_token = lanes / 32;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < warps_of_token; ++i) sum += read_float(statistics + (row * warps_of_token + i) * 4);
      const float r = reciprocal_deviation(sum, c.d, p.epsilon);
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int at = place + i * lanes;
        if (at >= vectors) continue;
        const vector16 weight = read_shared(norm_weights + at * 16);
        vector16 result;
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          float first, second, first_weight, second_weight;
          unpack<T>(value[i].word[word], first, second);
          unpack<T>(weight.word[word], first_weight, second_weight);
          result.word[word] =
              pack<T>(norm::template normalised<T>(first * r) * norm::factor(first_weight),
                      norm::template normalised<T>(second * r) * norm::factor(second_weight));
        }
        write_shared(input + row * c.input_stride() + at * 16, result);
      }
    }
    sync_consumers();
  }

  // Starts to copy a norm's weights, for normalise().
  __device__ __forceinline__ void fetch_norm(const void* weights) const {
    for (int at = threadIdx.x; at < c.d / 8; at += c.consumers())
      copy_async(norm_weights + at * 16, static_cast<const u8*>(weights) + at * 16, true);
    copy_async_commit();
  }

  // Multiplies this CTA's rows of weights by all tokens: of shared memory, or of `from`, where
  // other CTAs write them. Leaves the warps' sums in `to`.
  template <int k, int of_block, bool of_others>
  __device__ __forceinline__ void multiply(int rows, const T* from, u32 to) {
    constexpr int chunks = ceil_div(k, c.chunk), steps = c.chunk / 32 / c.team;
    const int blocks = ceil_div(rows, of_block);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
    const int team = warp / c.team, member = warp % c.team;
    int round = 0;
    for (int first = 0; first < blocks; first += c.teams(), ++round) {
      const int many = smaller(c.teams(), blocks - first), ways = c.teams() / many;
      const int block = team % many, way = team / many;
      if (way < ways) {
        float sum[4][4] = {};
        for (int chunk = way; chunk < chunks; chunk += ways) {
          const u32 number = counter + chunk * many + block;
          const bool has_token = group < c.tokens;
          vector16 tokens[of_others ? steps : 1];
          if constexpr (of_others) {
            const T* const at = from + static_cast<i64>(group) * k + chunk * c.chunk + pair * 8;
            poll<c.team * 32>(tokens, at + member * 32, [&](int i) {
              return has_token && in_row<k>(chunk, member + i * c.team);
            });
            __syncwarp();
          }
          wait_full(number);
          if constexpr (!cut.math) {
            const u32 weights = stage_address(number) + group * row_stride + pair * 16;
            const u32 token_at =
                input + group * c.input_stride() + (chunk * c.chunk + pair * 8) * 2;
#pragma unroll
            for (int i = 0; i < steps; ++i) {
              const int step = member + i * c.team;
              if (!in_row<k>(chunk, step)) continue;
              const vector16 low = read_shared(weights + step * 64);
              const vector16 high = read_shared(weights + step * 64 + 8 * row_stride);
              vector16 b = {};
              if constexpr (of_others) {
                b = tokens[i];
              } else {
                if (has_token) b = read_shared(token_at + step * 64);
              }
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const u32 a[4] = {low.word[2 * half], high.word[2 * half], low.word[2 * half + 1],
                                  high.word[2 * half + 1]};
                const u32 columns[2] = {b.word[2 * half], b.word[2 * half + 1]};
                mma_16x8x16<T>(sum[i % 2 * 2 + half], a, columns);
              }
            }
          }
          release(number, c.team);
        }
        const u32 at = to + (round * c.warps + warp) * (16 * c.token_columns() * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[0][i] = (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]);
        store_sums(at, group, pair, sum[0][0], sum[0][1]);
        store_sums(at, group + 8, pair, sum[0][2], sum[0][3]);
      }
      counter += many * chunks;
    }
  }
  template <int k>
  static __device__ __forceinline__ bool in_row(int chunk, int step) {
    if constexpr (k % c.chunk == 0) return true;
    return chunk * c.chunk + step * 32 < k;
  }
  static __device__ __forceinline__ void store_sums(u32 at, int row, int pair, float first,
                                                    float second) {
    if constexpr (c.tokens == 1) {
      if (pair == 0) write_float(at + row * 4, first);
    } else {
      if (2 * pair < c.tokens)
        write_pair(at + (row * c.token_columns() + 2 * pair) * 4, first, second);
    }
  }

  // The sum of all warps' parts of row `row` of block `block` of `blocks`.
  static __device__ __forceinline__ float sum_of(u32 from, int blocks, int block, int row,
                                                 int column) {
    const int round = block / c.teams(), many = smaller(c.teams(), blocks - round * c.teams());
    const int ways = c.teams() / many, first = block % c.teams();
    float sum = 0;
    for (int way = 0; way < ways; ++way)
#pragma unroll
      for (int member = 0; member < c.team; ++member) {
        const int warp = (way * many + first) * c.team + member;
        sum += read_float(
            from + (((round * c.warps + warp) * 16 + row) * c.token_columns() + column) * 4);
      }
    return sum;
  }

  __device__ __forceinline__ void finish_qkv(const persistent_layer_pointers& of, float* to) {
    const int first = first_row(c.qkv_rows()), rows = rows_of_block(c.qkv_rows());
    const int blocks = ceil_div(rows, 16);
    for (int at = threadIdx.x; at < rows * c.tokens; at += c.consumers()) {
      const int row = at / c.tokens, column = at % c.tokens, n = first + row;
      float sum = sum_of(sums[0], blocks, row / 16, row % 16, column);
      if constexpr (c.bias) {
        const int part = part_of(n);
        sum += to_float(static_cast<const T*>(of.bias[part])[n - first_of(part)]);
      }
      store_relaxed(to + static_cast<i64>(column) * c.qkv_rows() + n, sum);
    }
  }

  __device__ __forceinline__ void finish_hidden(T* to) {
    const int first = first_row(c.h), rows = rows_of_block(c.h), blocks = ceil_div(rows, 8);
    for (int at = threadIdx.x; at < rows * c.tokens; at += c.consumers()) {
      const int row = at / c.tokens, column = at % c.tokens;
      const float gate = sum_of(sums[0], blocks, row / 8, row % 8, column);
      const float up = sum_of(sums[0], blocks, row / 8, row % 8 + 8, column);
      store_relaxed(to + static_cast<i64>(column) * c.h + first + row,
                    from_float<T>(gated_product<activation>(gate, up)));
    }
  }

  // Each thread has one element of the residual stream at most.
  __device__ __forceinline__ void finish_residual(float& residual, T* to, bool plain) {
    const int first = first_row(c.d), rows = rows_of_block(c.d), blocks = ceil_div(rows, 16);
    const int row = threadIdx.x / c.tokens, column = threadIdx.x % c.tokens;
    if (row >= rows) return;
    const T result = from_float<T>(residual + sum_of(sums[1], blocks, row / 16, row % 16, column));
    residual = to_float(result);
    T* const at = to + static_cast<i64>(column) * c.d + first + row;
    if (plain)
      *at = result;
    else
      store_relaxed(at, result);
  }

  // ---- attention ----

  // Heads of q, and of the new k and v, normalised, rotated and rounded, to shared memory.
  __device__ __forceinline__ void prepare_heads(const persistent_layer_pointers& of,
                                                const float* qkv,
                                                const float2 (&turn)[rotary_pairs]) {
    constexpr int most = ceil_div(c.heads + 2 * c.kv_heads, c.warps), values = c.dim / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int count = has_new ? c.heads + 2 * c.kv_heads : c.heads;
    const float* const from = qkv + static_cast<i64>(token) * c.qkv_rows() + lane;
    u32 raw[most][values];
#pragma unroll
    for (int i = 0; i < most; ++i)
#pragma unroll
      for (int j = 0; j < values; ++j) {
        const int head = warp + i * c.warps;
        raw[i][j] = head < count ? load_relaxed_word(from + head * c.dim + j * 32) : 1;
      }
    int spins = 0;
#pragma unroll
    for (int i = 0; i < most; ++i) {
      const int head = warp + i * c.warps;
      if (head >= count) continue;
      float value[values];
#pragma unroll
      for (int j = 0; j < values; ++j) {
        while (!cut.waits && raw[i][j] == 0) {
          raw[i][j] = load_relaxed_word(from + head * c.dim + j * 32);
          count_spin(spins);
        }
        value[j] = __uint_as_float(~raw[i][j]);
      }
      __syncwarp();
      const int part = head < c.heads ? 0 : head < c.heads + c.kv_heads ? 1 : 2;
      if constexpr (c.head_norms) {
        if (part < 2) {
          float squares = 0;
#pragma unroll
          for (int j = 0; j < values; ++j) squares += value[j] * value[j];
#pragma unroll
          for (int other = 16; other > 0; other /= 2)
            squares += __shfl_xor_sync(~0u, squares, other);
          const float r = rsqrtf(squares / c.dim + p.epsilon);
          const T* const weights = static_cast<const T*>(of.head_norms[part]) + lane;
#pragma unroll
          for (int j = 0; j < values; ++j)
            value[j] *= r * (p.norm_offset + to_float(weights[j * 32]));
        }
      }
      if constexpr (c.rotates) {
        if (part < 2) {
#pragma unroll
          for (int j = 0; j < rotary_pairs; ++j) {
            const float low = value[j], high = value[j + rotary_pairs];
            value[j] = low * turn[j].x - high * turn[j].y;
            value[j + rotary_pairs] = high * turn[j].x + low * turn[j].y;
          }
        }
      }
      const u32 to = part == 0 ? queries + head * c.query_stride()
                               : new_row + (head - c.heads) * c.dim * 2;
#pragma unroll
      for (int j = 0; j < values; ++j)
        write_half(to + (lane + j * 32) * 2, from_float<T>(value[j]));
    }
  }

  __device__ __forceinline__ i64 slot() const {
    return c.wide_slots ? static_cast<const i64*>(p.slots)[token]
                        : static_cast<const int*>(p.slots)[token];
  }

  // Puts this warp's head of the new k or v into its row of the stage and of the cache.
  __device__ __forceinline__ void place_new(u32 row, u32 from, void* cache, int kv_head) const {
    const int lane = threadIdx.x % 32;
    if (lane < c.dim / 8) {
      const vector16 value = read_shared(from + (kv_head * c.dim + lane * 8) * 2);
      write_shared(row + (kv_head * c.dim + lane * 8) * 2, value);
      const i64 to = slot();
      if (to >= 0)
        store(static_cast<T*>(cache) + to * c.kv_rows() + kv_head * c.dim + lane * 8, value);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void attend(const persistent_layer_pointers& of, float* partial,
                                         float* partial_sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
    const int kv_head = warp % c.kv_heads, group = warp / c.kv_heads;
    const int blocks = ceil_div(keys, 16);
    constexpr int steps = c.dim / 32, tiles = c.dim / 16;
    vector16 query[steps];
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      query[i] = {};
      if (row < c.group_heads() && keys > 0)
        query[i] = read_shared(queries + (kv_head * c.group_heads() + row) * c.query_stride() +
                               i * 64 + pair * 16);
    }
    float out[tiles][4] = {}, most[2], total[2] = {};
    most[0] = most[1] = __uint_as_float(0xff800000u);
    for (int block = group; block < blocks; block += c.groups()) {
      const u32 number = counter + 2 * block, key_stage = stage_address(number);
      const int there = keys - 16 * block;  // rows of the stages
      const bool last = block == blocks - 1;
      wait_full(number);
      if (last && has_new)
        place_new(key_stage + (there - 1) * key_stride, new_row, of.keys, kv_head);
      float score[2][4] = {};
      const u32 at = key_stage + row * key_stride + (kv_head * c.dim + pair * 8) * 2;
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        const vector16 low = read_shared(at + i * 64);
        const vector16 high = read_shared(at + i * 64 + 8 * key_stride);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 a[4] = {low.word[2 * half], high.word[2 * half], low.word[2 * half + 1],
                            high.word[2 * half + 1]};
          const u32 b[2] = {query[i].word[2 * half], query[i].word[2 * half + 1]};
          mma_16x8x16<T>(score[half], a, b);
        }
      }
      float weight[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool valid = row + (i < 2 ? 0 : 8) < there;
        weight[i] = valid ? (score[0][i] + score[1][i]) * p.scale : __uint_as_float(0xff800000u);
      }
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float now = fmaxf(weight[column], weight[column + 2]);
#pragma unroll
        for (int other = 4; other < 32; other *= 2)
          now = fmaxf(now, __shfl_xor_sync(~0u, now, other));
        now = fmaxf(now, most[column]);
        const float factor = approximate_exp2(most[column] - now);
        most[column] = now;
        weight[column] = approximate_exp2(weight[column] - now);
        weight[column + 2] = approximate_exp2(weight[column + 2] - now);
        total[column] = total[column] * factor + weight[column] + weight[column + 2];
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
          out[tile][column] *= factor;
          out[tile][column + 2] *= factor;
        }
      }
      const u32 b[2] = {transposed_matrix(pack<T>(weight[0], weight[1])),
                        transposed_matrix(pack<T>(weight[2], weight[3]))};
      const bool wrote = last && (has_new || there < 16);
      if (wrote) async_proxy_fence();
      release(number, c.kv_heads);

      const u32 value_stage = stage_address(number + 1);
      wait_full(number + 1);
      if (last) {
        if (has_new)
          place_new(value_stage + (there - 1) * value_stride, new_row + 2 * c.kv_rows(), of.values,
                    kv_head);
        // What an earlier stage left behind the keys may be NaN, and a weight of 0 does not undo it.
        for (int at_row = there; at_row < 16; ++at_row)
          if (lane < c.dim / 8)
            write_shared(value_stage + at_row * value_stride + (kv_head * c.dim + lane * 8) * 2,
                         vector16{});
        __syncwarp();
      }
      const u32 values = value_stage + (lane % 8 + lane / 16 * 8) * value_stride +
                         (kv_head * c.dim + lane / 8 % 2 * 8) * 2;
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        u32 a[4];
        load_matrices_transposed(a[0], a[1], a[2], a[3], values + tile * 32);
        mma_16x8x16<T>(out[tile], a, b);
      }
      if (wrote) async_proxy_fence();
      release(number + 1, c.kv_heads);
    }
    counter += 2 * blocks;
    if (group >= blocks) return;
    const int part = split * parts_of_split(keys_of_split(p.lengths[token])) + group;
    const i64 part_row = static_cast<i64>(token) * c.parts(p.cache) + part;
#pragma unroll
    for (int column = 0; column < 2; ++column) {
#pragma unroll
      for (int other = 4; other < 32; other *= 2)
        total[column] += __shfl_xor_sync(~0u, total[column], other);
      const int in_group = 2 * pair + column;
      if (in_group >= c.group_heads()) continue;
      const int head = kv_head * c.group_heads() + in_group;
      const float factor = 1.0f / total[column];
      if (row == 0)
        store_relaxed(partial_sums + part_row * c.heads + head,
                      most[column] + log2f(total[column]));
      float* const to = partial + part_row * c.q_rows() + head * c.dim + row;
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        store_relaxed(to + tile * 16, out[tile][column] * factor);
        store_relaxed(to + tile * 16 + 8, out[tile][column + 2] * factor);
      }
    }
  }
  static __device__ __forceinline__ int parts_of_split(int split_keys) {
    return smaller(c.groups(), ceil_div(split_keys, 16));
  }

  // Combines the parts of this CTA's share of the features of all heads.
  __device__ __forceinline__ void combine(const float* partial, const float* partial_sums, T* to) {
    constexpr int places = c.unit_threads(), sharers = c.consumers() / places, batch = 4;
    constexpr int units_of_token = c.q_rows() / 4;
    const int place = threadIdx.x % places, sharer = threadIdx.x / places;
    const int first = first_row(c.units()), count = rows_of_block(c.units());
    const int unit = first + place, row = unit / units_of_token;
    const int feature = unit % units_of_token * 4, head = feature / c.dim;
    const float least = __uint_as_float(0xff800000u);
    float most = least, total = 0;
    float4 sum = {0, 0, 0, 0};
    if (place < count) {
      const int length = p.lengths[row], each = keys_of_split(length);
      const int splits = ceil_div(length, each), of_split = parts_of_split(each);
      const int parts = (splits - 1) * of_split +
                        smaller(c.groups(), ceil_div(length - (splits - 1) * each, 16));
      const i64 row_of_parts = static_cast<i64>(row) * c.parts(p.cache);
      const float* const values = partial + row_of_parts * c.q_rows() + feature;
      const float* const logs = partial_sums + row_of_parts * c.heads + head;
      int spins = 0;
      for (int part = sharer; part < parts; part += batch * sharers) {
        vector16 value[batch];
        u32 log[batch];
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          const int at = part + i * sharers;
          log[i] = 1;
          if (at >= parts) continue;
          value[i] = load_relaxed(values + static_cast<i64>(at) * c.q_rows());
          log[i] = load_relaxed_word(logs + static_cast<i64>(at) * c.heads);
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          const int at = part + i * sharers;
          if (at >= parts) continue;
          while (!cut.waits && log[i] == 0) {
            log[i] = load_relaxed_word(logs + static_cast<i64>(at) * c.heads);
            count_spin(spins);
          }
          while (!cut.waits && (value[i].word[0] == 0 || value[i].word[1] == 0 ||
                                value[i].word[2] == 0 || value[i].word[3] == 0)) {
            value[i] = load_relaxed(values + static_cast<i64>(at) * c.q_rows());
            count_spin(spins);
          }
          const float now = __uint_as_float(~log[i]);
          merge(most, total, sum, now, 1.0f,
                {__uint_as_float(~value[i].word[0]), __uint_as_float(~value[i].word[1]),
                 __uint_as_float(~value[i].word[2]), __uint_as_float(~value[i].word[3])});
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int other = places; other < 32; other *= 2) {
      const float other_most = __shfl_xor_sync(~0u, most, other);
      const float other_total = __shfl_xor_sync(~0u, total, other);
      const float4 other_sum = {
          __shfl_xor_sync(~0u, sum.x, other), __shfl_xor_sync(~0u, sum.y, other),
          __shfl_xor_sync(~0u, sum.z, other), __shfl_xor_sync(~0u, sum.w, other)};
      merge_equal(most, total, sum, other_most, other_total, other_sum);
    }
    constexpr int rows = c.combined_rows();
    const u32 logs_at = combined + rows * places * 16, totals_at = logs_at + rows * places * 4;
    const int own = places <= 32 ? threadIdx.x / 32 : sharer;
    if (places > 32 || threadIdx.x % 32 < places) {
      const int at = own * places + place;
      write_shared(combined + at * 16,
                   {__float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z),
                    __float_as_uint(sum.w)});
      write_float(logs_at + at * 4, most);
      write_float(totals_at + at * 4, total);
    }
    sync_consumers();
    for (int at = threadIdx.x; at < 4 * count; at += c.consumers()) {
      float all_most = least;
#pragma unroll
      for (int i = 0; i < rows; ++i)
        all_most = fmaxf(all_most, read_float(logs_at + (i * places + at / 4) * 4));
      float all_total = 0, value = 0;
#pragma unroll
      for (int i = 0; i < rows; ++i) {
        const int from = i * places + at / 4;
        const float factor = approximate_exp2(read_float(logs_at + from * 4) - all_most);
        all_total += factor * read_float(totals_at + from * 4);
        value += factor * read_float(combined + from * 16 + at % 4 * 4);
      }
      store_relaxed(to + static_cast<i64>(first) * 4 + at, from_float<T>(value / all_total));
    }
  }
  // `now` is finite, `most` may be minus infinity.
  static __device__ __forceinline__ void merge(float& most, float& total, float4& sum, float now,
                                               float of_now, float4 value) {
    const float larger_one = fmaxf(most, now);
    const float old = approximate_exp2(most - larger_one), fresh = approximate_exp2(now - larger_one);
    most = larger_one;
    total = total * old + fresh * of_now;
    sum = {sum.x * old + value.x * fresh, sum.y * old + value.y * fresh,
           sum.z * old + value.z * fresh, sum.w * old + value.w * fresh};
  }
  // Of two lanes, in both with the same bits.
  static __device__ __forceinline__ void merge_equal(float& most, float& total, float4& sum,
                                                     float other_most, float other_total,
                                                     float4 other_sum) {
    const float larger_one = fmaxf(most, other_most);
    const bool none = larger_one == __uint_as_float(0xff800000u);
    const float old = none ? 0 : approximate_exp2(most - larger_one);
    const float fresh = none ? 0 : approximate_exp2(other_most - larger_one);
    most = larger_one;
    total = total * old + other_total * fresh;
    sum = {sum.x * old + other_sum.x * fresh, sum.y * old + other_sum.y * fresh,
           sum.z * old + other_sum.z * fresh, sum.w * old + other_sum.w * fresh};
  }

  // ---- a layer ----

  __device__ __forceinline__ void consume() {
    float2 turn[rotary_pairs] = {};
    if (c.rotates && keys > 0) {
#pragma unroll
      for (int j = 0; j < rotary_pairs; ++j)
        turn[j] = turn_of<head_rotation::halves, float>(
            {p.positions, p.angles, p.table_rows, p.angle_scale}, p.frequencies, token,
            static_cast<int>(threadIdx.x % 32) + j * 32, c.dim / 2);
    }
    float residual = 0;
    const int out_rows = rows_of_block(c.d);
    {
      const int row = threadIdx.x / c.tokens, column = threadIdx.x % c.tokens;
      if (row < out_rows)
        residual = to_float(
            static_cast<const T*>(p.x)[static_cast<i64>(column) * c.d + first_row(c.d) + row]);
    }
    fetch_norm(p.of[0].attn_norm);
    for (int layer = 0; layer < p.layers; ++layer) {
      const persistent_layer_pointers& of = p.of[layer];
      u8* const set = set_of(layer);
      float* const qkv = reinterpret_cast<float*>(set);
      float* const partial = reinterpret_cast<float*>(set + c.partial_at());
      float* const partial_sums = reinterpret_cast<float*>(set + c.sums_at(p.cache));
      T* const attended = reinterpret_cast<T*>(set + c.attended_at(p.cache));
      T* const mid = reinterpret_cast<T*>(set + c.mid_at(p.cache));
      T* const hidden = reinterpret_cast<T*>(set + c.hidden_at(p.cache));
      mark(layer, 0);
      normalise(layer == 0 ? static_cast<const T*>(p.x)
                           : reinterpret_cast<const T*>(set_of(layer - 1) + c.y_at(p.cache)),
                layer == 0);
      mark(layer, 1);
      fetch_norm(of.ffn_norm);
      multiply<c.d, 16, false>(rows_of_block(c.qkv_rows()), nullptr, sums[0]);
      sync_consumers();
      mark(layer, 2);
      finish_qkv(of, qkv);
      mark(layer, 3);
      if constexpr (!cut.attention) {
        if (keys > 0) prepare_heads(of, qkv, turn);
        sync_consumers();
        mark(layer, 4);
        attend(of, partial, partial_sums);
        mark(layer, 5);
        combine(partial, partial_sums, attended);
        mark(layer, 6);
      }
      multiply<c.q_rows(), 16, !cut.attention>(out_rows, attended, sums[1]);
      sync_consumers();
      mark(layer, 7);
      finish_residual(residual, mid, false);
      mark(layer, 8);
      normalise(mid, false);
      mark(layer, 9);
      named_barrier_arrive(2, c.consumers() + 32);
      if (layer + 1 < p.layers) fetch_norm(p.of[layer + 1].attn_norm);
      multiply<c.d, 8, false>(rows_of_block(c.h), nullptr, sums[0]);
      named_barrier_sync(3, c.consumers() + 32);
      mark(layer, 10);
      finish_hidden(hidden);
      mark(layer, 11);
      multiply<c.h, 16, true>(out_rows, hidden, sums[1]);
      sync_consumers();
      mark(layer, 12);
      const bool end = layer + 1 == p.layers;
      finish_residual(residual, end ? static_cast<T*>(p.y) : reinterpret_cast<T*>(set + c.y_at(p.cache)),
                      end);
      mark(layer, 13);
    }
  }
};

template <class T, persistent_config config, class activation, class norm,
          persistent_cut cut = persistent_cut{}>
__device__ __forceinline__ void run_layers(const persistent_params& params) {
  extern __shared__ __align__(128) u8 shared[];
  persistent_layers<T, config, activation, norm, cut> layers(params, shared_address(shared));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < config.stages; ++stage) {
      barrier_init(layers.full + 8 * stage, 1);
      barrier_init(layers.empty + 8 * stage, config.released);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp < config.warps) {
    take_registers<config.consumer_registers()>();
    layers.consume();
  } else {
    give_registers<config.other_registers>();
    if (warp == config.warps) layers.produce();
    if (warp == config.warps + 1) layers.clean();
  }
}

template <class T, persistent_config config, class activation, class norm>
__global__ void __launch_bounds__(config.threads(), 1)
    persistent_layer(const __grid_constant__ persistent_params params) {
  run_layers<T, config, activation, norm>(params);
}

}  // namespace fftune
