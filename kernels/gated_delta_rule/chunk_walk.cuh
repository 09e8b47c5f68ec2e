// Common parts of the walks of gated-delta-rule over chunks of 64 tokens (chunk_scan.cu,
// chunk_backward.cu): the stages of shared memory, the producer, and an MMA warpgroup's 64 rows of
// a state (sm_90a).
#pragma once

#include "common/async.cuh"
#include "common/mma.cuh"
#include "gated_delta_rule/chunk_params.cuh"
#include "gated_delta_rule/token.cuh"

namespace fftune {

struct delta_scan_config {
  int warpgroups = 1;  // of 64 rows of v
  int stages = 2;
  int segments = 1;
  bool transfer = false;  // what segments do to a state
  bool keeps = false;     // the states before chunks and delta, for a backward pass
  bool back = false;      // from the last chunk to the first, with d_out in the place of v

  constexpr bool has_out() const { return !transfer && !keeps && !back; }
};

template <delta_rule_form form, delta_scan_config c>
struct delta_scan {
  using T = element_type<form.type>;
  using State = element_type<form.state>;
  static constexpr int slabs = form.dim / 64, slab_bytes = delta_chunk * 128;
  static constexpr int threads = 128 * (c.warpgroups + 1);
  // A stage.
  static constexpr int k_at = 0, q_at = slabs * slab_bytes, v_at = 2 * slabs * slab_bytes;
  static constexpr int inverse_at = v_at + c.warpgroups * slab_bytes;
  static constexpr int read_at = inverse_at + slab_bytes;
  static constexpr int factors_at = read_at + slab_bytes;
  static constexpr int stage_bytes = factors_at + delta_chunk_factors * 4;
  static constexpr int out_at = c.stages * stage_bytes;
  // For each warpgroup: out, delta or dv [64 tokens, 64], then kept tiles, Y and a state [64, dim].
  static constexpr int kept_at = out_at + c.warpgroups * slab_bytes;
  static constexpr int kept_bytes = c.keeps  ? slabs * slab_bytes
                                    : c.back ? (slabs + 1) * slab_bytes
                                             : 0;
  static constexpr int barriers_at = kept_at + c.warpgroups * kept_bytes;
  static constexpr int bytes = barriers_at + 2 * c.stages * 8;
  // Rows of B or a state, then of A.
  static constexpr int rows = form.v_dim + (c.transfer ? form.dim : 0);
  static constexpr int blocks = rows / (64 * c.warpgroups);
  static constexpr int segments = c.segments - (c.transfer ? 1 : 0);
  using stages = pipeline<c.stages, stage_bytes>;
  static_assert(stage_bytes % 1024 == 0 && form.dim % 64 == 0 &&
                form.v_dim % (64 * c.warpgroups) == 0);
  static_assert(!c.transfer || form.dim % (64 * c.warpgroups) == 0);
};

// The rows and the segment of a CTA.
template <delta_rule_form form, delta_scan_config c>
struct delta_scan_work {
  int index, head, segment;
  int first_v;     // row of v, or of A
  bool of_a;       // its rows are A's
  int begin, end;  // chunks
  bool is_last;    // the sequence ends with it
  delta_rule_sequence sequence;
  i64 row, slot;  // of the sequence's first token, and its first chunk
  i64 transfers;  // the segment's place among the states of all segments but the last

  __device__ __forceinline__ delta_scan_work(const delta_rule_params& p) {
    using Scan = delta_scan<form, c>;
    const int block = static_cast<int>(blockIdx.x) % Scan::blocks;
    const int of_head = static_cast<int>(blockIdx.x) / Scan::blocks / Scan::segments;
    segment = static_cast<int>(blockIdx.x) / Scan::blocks % Scan::segments;
    index = of_head / p.v_heads;
    head = of_head % p.v_heads;
    first_v = block * 64 * c.warpgroups;
    of_a = first_v >= form.v_dim;
    if (of_a) first_v -= form.v_dim;
    sequence = sequence_of(p, index);
    row = first_row(p, sequence, index);
    slot = row / delta_chunk + index;
    const int chunks =
        sequence.state < 0 ? 0 : ceil_div(sequence.end - sequence.first, delta_chunk);
    const int each = ceil_div(chunks, c.segments);
    begin = smaller(segment * each, chunks);
    end = smaller(begin + each, chunks);
    is_last = end == chunks && (begin < end || segment == 0);
    transfers = (static_cast<i64>(of_head) * (c.segments - 1) + segment) * (form.v_dim + form.dim) *
                form.dim;
  }
  __device__ __forceinline__ int tokens(int chunk) const {
    return smaller(sequence.end - sequence.first - chunk * delta_chunk, delta_chunk);
  }
};

// The pipeline at the beginning of shared memory, with barriers that all threads may use.
template <delta_rule_form form, delta_scan_config c>
__device__ __forceinline__ typename delta_scan<form, c>::stages start_stages(u32 base) {
  using Scan = delta_scan<form, c>;
  const typename Scan::stages pipe{base, base + Scan::barriers_at,
                                   base + Scan::barriers_at + c.stages * 8};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < c.stages; ++stage) {
      barrier_init(pipe.full + stage * 8, 1);
      barrier_init(pipe.empty + stage * 8, 4 * c.warpgroups);
    }
    barrier_init_fence();
  }
  __syncthreads();
  return pipe;
}

template <delta_rule_form form, delta_scan_config c>
__device__ __forceinline__ void load_chunks(const delta_chunk_params& p,
                                            const delta_scan_work<form, c>& work,
                                            typename delta_scan<form, c>::stages pipe) {
  using Scan = delta_scan<form, c>;
  constexpr auto kept = l2_policy::evict_last;
  constexpr bool has_q = c.has_out() || c.back;
  constexpr int image_bytes = has_q ? delta_image_bytes : delta_image_bytes / 2;
  const int k_head = work.head / (p.layer.v_heads / p.layer.heads);
  const int bytes = Scan::slabs * Scan::slab_bytes * (has_q ? 2 : 1) + image_bytes +
                    (work.of_a ? 0 : c.warpgroups * Scan::slab_bytes) + delta_chunk_factors * 4;
  for (int i = work.begin; i < work.end; ++i, pipe.advance()) {
    const int chunk = c.back ? work.begin + work.end - 1 - i : i;
    pipe.wait_empty();
    const u32 full = pipe.full_barrier(), to = pipe.buffer();
    const int row = static_cast<int>(work.row) + chunk * delta_chunk;
    barrier_arrive_expect(full, bytes);
#pragma unroll
    for (int slab = 0; slab < Scan::slabs; ++slab)
      tma_load(to + Scan::k_at + slab * Scan::slab_bytes, p.k, full, k_head * form.dim + slab * 64,
               row, kept);
    const i64 at = (work.slot + chunk) * p.layer.v_heads + work.head;
    bulk_load(to + Scan::factors_at, p.factors + at * delta_chunk_factors, delta_chunk_factors * 4,
              full);
    if (!work.of_a) {
#pragma unroll
      for (int part = 0; part < c.warpgroups; ++part)
        tma_load(to + Scan::v_at + part * Scan::slab_bytes, c.back ? p.d_out : p.v, full,
                 work.head * form.v_dim + work.first_v + part * 64, row, l2_policy::evict_first);
    }
    if constexpr (has_q) {
#pragma unroll
      for (int slab = 0; slab < Scan::slabs; ++slab)
        tma_load(to + Scan::q_at + slab * Scan::slab_bytes, p.q, full,
                 k_head * form.dim + slab * 64, row, kept);
    }
    bulk_load(to + Scan::inverse_at, static_cast<const char*>(p.images) + at * delta_image_bytes,
              image_bytes, full);
  }
}

// The producer warpgroup: true of its threads. One of them loads all chunks. The others' registers
// go to the MMA warpgroups.
template <delta_rule_form form, delta_scan_config c>
__device__ __forceinline__ bool produce_chunks(const delta_chunk_params& p,
                                               const delta_scan_work<form, c>& work,
                                               typename delta_scan<form, c>::stages pipe) {
  if (static_cast<int>(threadIdx.x) / 128 == c.warpgroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    // The images were written by generic stores.
    asm volatile("fence.proxy.async.global;" ::: "memory");
    if (threadIdx.x / 32 % 4 == 0 && is_elected()) load_chunks<form, c>(p, work, pipe);
    return true;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  return false;
}

// Stores contiguous bytes, part of a group as tma_store is.
__device__ __forceinline__ void bulk_store(void* global, u32 shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}

// 64 rows of a state in the registers of a warpgroup, transposed: row of v, feature of k.
template <delta_rule_form form, delta_scan_config c>
struct delta_warpgroup {
  using Scan = delta_scan<form, c>;
  using T = typename Scan::T;
  using State = typename Scan::State;
  static constexpr int features = form.dim;

  float state[features / 2];
  u32 operand[features / 16][4];  // its copy in bf16, A of the products

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ __forceinline__ int warpgroup() { return static_cast<int>(threadIdx.x) / 128; }
  // The first row of v of a thread among those of its warpgroup; the other one is 8 further.
  static __device__ __forceinline__ int own_row() {
    return static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane() / 4;
  }
  static __device__ __forceinline__ int own_column() { return 2 * (lane() % 4); }

  static __device__ __forceinline__ i64 state_at(int v, int k) {
    return form.key_major ? static_cast<i64>(k) * form.v_dim + v
                          : static_cast<i64>(v) * form.dim + k;
  }
  // Calls visit(row, feature of k, accumulator) for all elements.
  template <class Visit>
  __device__ __forceinline__ void for_each_element(int first_row, const Visit& visit) {
#pragma unroll
    for (int j = 0; j < features / 2; ++j)
      visit(first_row + 64 * warpgroup() + own_row() + (j & 2) * 4,
            j / 4 * 8 + own_column() + (j & 1), state[j]);
  }
  // The accumulators as A of the next products.
  template <int count>
  static __device__ __forceinline__ void convert(const float (&from)[count],
                                                 u32 (&to)[count / 8][4]) {
#pragma unroll
    for (int step = 0; step < count / 8; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        to[step][i] = pack<T>(from[8 * step + 2 * i], from[8 * step + 2 * i + 1]);
    }
  }

  // sum = Sᵀ tileᵀ, of a tile of 64 tokens.
  __device__ __forceinline__ void issue_state_product(float (&to)[delta_chunk / 2], u32 tile) {
#pragma unroll
    for (int step = 0; step < features / 16; ++step)
      wgmma_registers<T, delta_chunk>(
          to, operand[step], wgmma_descriptor(tile + step / 4 * Scan::slab_bytes) + step % 4 * 2,
          step > 0);
    wgmma_commit();
  }
  // to (+)= values matrixᵀ, of a matrix [64, 64] of a chunk; `transposed`: values matrix.
  template <bool transposed = false>
  static __device__ __forceinline__ void issue_chunk_product(float (&to)[delta_chunk / 2],
                                                             const u32 (&values)[4][4], u32 matrix,
                                                             bool adds) {
#pragma unroll
    for (int step = 0; step < delta_chunk / 16; ++step)
      wgmma_registers<T, delta_chunk, transposed>(
          to, values[step],
          transposed ? wgmma_transposed_descriptor(matrix + step * 2048)
                     : wgmma_descriptor(matrix) + step * 2,
          adds || step > 0);
    wgmma_commit();
  }
  // Sᵀ += values tile, of a tile [64 tokens, dim]. Not committed.
  __device__ __forceinline__ void issue_write(const u32 (&values)[4][4], u32 tile) {
#pragma unroll
    for (int step = 0; step < delta_chunk / 16; ++step)
      wgmma_registers<T, features, true>(state, values[step],
                                         wgmma_transposed_descriptor(tile + step * 2048), 1);
  }

  // Rows of a tile behind the last token become zeros, so that they add nothing, whatever they
  // hold.
  static __device__ __forceinline__ void clear_rows(u32 tile, int tokens) {
    for (int i = static_cast<int>(threadIdx.x); i < Scan::slabs * (delta_chunk - tokens) * 8;
         i += 128 * c.warpgroups) {
      const int slab = i / ((delta_chunk - tokens) * 8), at = i % ((delta_chunk - tokens) * 8);
      store_shared(tile + slab * Scan::slab_bytes + tokens * 128 + at * 16, float4{});
    }
    async_proxy_fence();
    named_barrier_sync(1, 128 * c.warpgroups);
  }

  // Words [64 of v, 64 tokens] of a chunk, as A would have them, to a tile [64 tokens, 64 of v].
  static __device__ __forceinline__ void store_transposed(u32 buffer, const u32 (&words)[4][4]) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
#pragma unroll
    for (int pair = 0; pair < delta_chunk / 16; ++pair) {
      // Matrices of 8 rows of v and 8 tokens: v, v + 8, then the next 8 tokens.
      const int token = 16 * pair + lane() / 16 * 8 + lane() % 8;
      const int chunk = thread / 32 * 2 + lane() / 8 % 2;
      store_matrices<true>(buffer + token * 128 + ((chunk ^ token % 8) * 16), words[pair]);
    }
  }
  // The state's copy in bf16 to tiles [64 of v, 64 features].
  __device__ __forceinline__ void store_operand(u32 buffer) const {
#pragma unroll
    for (int step = 0; step < features / 16; ++step) {
      const int row = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane() % 16;
      const int chunk = 2 * step + lane() / 16;
      store_matrices<false>(
          buffer + chunk / 8 * Scan::slab_bytes + row * 128 + ((chunk % 8 ^ row % 8) * 16),
          operand[step]);
    }
  }
  // Words of a chunk, as A would have them, through shared memory to the rows of its tokens.
  static __device__ __forceinline__ void store_rows(const delta_rule_params& p, void* rows,
                                                    const delta_scan_work<form, c>& work,
                                                    u32 buffer, const u32 (&words)[4][4], i64 row,
                                                    int tokens) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    store_transposed(buffer, words);
    named_barrier_sync(2 + warpgroup(), 128);
    T* const to = static_cast<T*>(rows) + (row * p.v_heads + work.head) * form.v_dim +
                  work.first_v + 64 * warpgroup();
#pragma unroll
    for (int i = 0; i < delta_chunk * 8 / 128; ++i) {
      const int token = i * 16 + thread / 8, chunk = thread % 8;
      const float4 value = load_shared(buffer + token * 128 + ((chunk ^ token % 8) * 16));
      if (token < tokens)
        store(to + static_cast<i64>(token) * p.v_heads * form.v_dim + chunk * 8,
              {__float_as_uint(value.x), __float_as_uint(value.y), __float_as_uint(value.z),
               __float_as_uint(value.w)});
    }
    named_barrier_sync(2 + warpgroup(), 128);  // before the next chunk's words
  }

  // Where a chunk's tiles of this warpgroup are kept, in a tensor with tiles of `columns` columns.
  static __device__ __forceinline__ char* tile_of(void* tiles, const delta_rule_params& p,
                                                  const delta_scan_work<form, c>& work, int chunk,
                                                  int columns) {
    const i64 of_head = (work.slot + chunk) * p.v_heads + work.head;
    return static_cast<char*>(tiles) +
           (of_head * (form.v_dim / 64) + work.first_v / 64 + warpgroup()) * (columns * 128);
  }
  static __device__ __forceinline__ void sync() {
    named_barrier_sync(2 + warpgroup(), 128);
  }
  static __device__ __forceinline__ bool is_first() {
    return threadIdx.x % 128 == 0;
  }
};

}  // namespace fftune
