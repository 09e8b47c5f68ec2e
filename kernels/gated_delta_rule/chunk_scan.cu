// The walk of the state of gated-delta-rule over chunks of 64 tokens (chunk_prepare.cu), with wgmma
// (sm_90a). Sᵀ [rows of v, features of k] stays in the accumulators of an MMA warpgroup from the
// first chunk to the last, and as A in registers it is the operand of the next chunk's products:
//
//   producer warp        shared memory, stages       MMA warpgroups, 64 rows of v each
//  +----------------+   +-----------------------+   +--------------------------------------+
//  | TMA: k, q, v   |-->| k, q [64, dim]        |-->| held  = S kT                   wgmma |
//  | bulk: inverse, |   | v [64, 64] for each   |   | error = beta (v - exp(G) held)       |
//  | read, factors  |   |   warpgroup           |   | delta = error inverseT         wgmma |
//  +----------------+   | inverse, read [64,64] |   | out   = exp(G) (S qT) + delta readT  |
//                       | factors               |   | S     = exp(G_last) S + (w delta) k  |
//                       +-----------------------+   |                                      |
//                       | out [64, 64] for each |<--| out: stmatrix, then 16-byte stores   |
//                       |   warpgroup           |   |                                      |
//                       +-----------------------+   +--------------------------------------+
//
//  barrier         arrivals that complete a phase          who waits
//  full [stage]    the producer with the stage's bytes     MMA warpgroups
//  empty [stage]   a lane of each MMA warp                 the producer
//  own             named: the 128 threads of a warpgroup   the same, around `out`, and zero rows
//
// Accumulators have the layout of A in registers, so neither the state, nor the error, nor delta
// passes through shared memory. While a chunk's error is computed, Sᵀ qᵀ runs; while its state is
// converted to bf16, delta readᵀ runs; and out of a chunk, in bf16, is stored beneath the next
// one's Sᵀ kᵀ.
//
// TMA reads whole chunks: rows behind the last token are another sequence's. Their v is replaced by
// zeros in registers and their k in shared memory; their rows of read and of factors are zeros.
//
// Long sequences of few heads are cut into segments, whose walks run side by side. What a segment
// does to a state is S_end = S_begin A + B, so a walk before that one (`transfer`) takes each
// segment but the last: from zeros, without out, it ends with B; and from the identity with v = 0,
// with A. A kernel in between, `join`, then adds up where each segment begins.
//
// Grid: sequences * v_heads * segments * (rows / (64 * warpgroups)): rows of v, in `transfer` also
// of A.
#include "gated_delta_rule/chunk_walk.cuh"

namespace fftune {

template <delta_rule_form form, delta_scan_config c>
struct delta_walk : delta_warpgroup<form, c> {
  using Warpgroup = delta_warpgroup<form, c>;
  using Scan = typename Warpgroup::Scan;
  using T = typename Scan::T;
  using State = typename Scan::State;
  using Warpgroup::convert, Warpgroup::for_each_element, Warpgroup::issue_chunk_product;
  using Warpgroup::features, Warpgroup::warpgroup, Warpgroup::clear_rows, Warpgroup::issue_write;
  using Warpgroup::issue_state_product, Warpgroup::lane, Warpgroup::own_column;
  using Warpgroup::operand, Warpgroup::state, Warpgroup::state_at, Warpgroup::store_rows;

  float sum[delta_chunk / 2];  // held, then delta
  float out[delta_chunk / 2];

  // The state at the segment's beginning.
  __device__ __forceinline__ void begin(const delta_chunk_params& p,
                                        const delta_scan_work<form, c>& work, i64 place) {
    const delta_rule_params& f = p.layer;
    const bool has_state =
        f.state_in != nullptr && (f.has_state == nullptr || f.has_state[work.index] != 0);
    const State* const from = static_cast<const State*>(f.state_in) + place;
    if (work.of_a) {
      for_each_element(work.first_v,
                       [](int v, int k, float& value) { value = v == k ? 1.0f : 0.0f; });
    } else if (work.segment == 0) {
      for_each_element(work.first_v, [&](int v, int k, float& value) {
        value = has_state ? to_float(from[state_at(v, k)]) : 0.0f;
      });
    } else if constexpr (c.transfer) {
      for_each_element(work.first_v, [](int, int, float& value) { value = 0.0f; });
    } else if constexpr (c.segments > 1) {
      const float* const starts =
          p.transfers + work.transfers - static_cast<i64>(form.v_dim + form.dim) * form.dim;
      for_each_element(work.first_v, [&](int v, int k, float& value) {
        value = starts[static_cast<i64>(v) * form.dim + k];
      });
    }
  }
  // The state at its end.
  __device__ __forceinline__ void end(const delta_chunk_params& p,
                                      const delta_scan_work<form, c>& work, i64 place) {
    if constexpr (c.transfer) {
      float* const to =
          p.transfers + work.transfers + (work.of_a ? static_cast<i64>(form.v_dim) * form.dim : 0);
      for_each_element(work.first_v, [&](int v, int k, float& value) {
        to[static_cast<i64>(v) * form.dim + k] = value;
      });
    } else if (work.is_last && p.layer.state_out != nullptr) {
      State* const to = static_cast<State*>(p.layer.state_out) + place;
      for_each_element(work.first_v, [&](int v, int k, float& value) {
        to[state_at(v, k)] = from_float<State>(value);
      });
    }
  }

  // error = beta (v - exp(G) held). Matrices of v: 8 tokens and 8 rows of v, transposed.
  __device__ __forceinline__ void find_error(u32 (&values)[4][4],
                                             const delta_scan_work<form, c>& work, u32 stage,
                                             int tokens) const {
    const u32 factors = stage + Scan::factors_at;
#pragma unroll
    for (int step = 0; step < delta_chunk / 16; ++step) {
      u32 v[4] = {};
      const int token = 16 * step + lane() / 16 * 8 + lane() % 8;
      const int column = static_cast<int>(threadIdx.x) % 128 / 32 * 2 + lane() / 8 % 2;
      if (!work.of_a)
        load_matrices_transposed(v[0], v[1], v[2], v[3],
                                 stage + Scan::v_at + warpgroup() * Scan::slab_bytes + token * 128 +
                                     ((column ^ token % 8) * 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = 16 * step + i / 2 * 8 + own_column();
        const float2 decay =
            load_shared_pair(factors + (factor_at(delta_factor::held) + first) * 4);
        const float2 beta = load_shared_pair(factors + (factor_at(delta_factor::beta) + first) * 4);
        float a, b;
        unpack<T>(v[i], a, b);
        a = beta.x * a - decay.x * sum[8 * step + 2 * i];
        b = beta.y * b - decay.y * sum[8 * step + 2 * i + 1];
        values[step][i] = pack<T>(first < tokens ? a : 0.0f, first + 1 < tokens ? b : 0.0f);
      }
    }
  }

  __device__ __forceinline__ void run(const delta_chunk_params& p,
                                      const delta_scan_work<form, c>& work,
                                      typename Scan::stages pipe, u32 out_buffer) {
    const delta_rule_params& f = p.layer;
    const i64 place =
        work.sequence.state * f.state_block + static_cast<i64>(work.head) * form.dim * form.v_dim;
    begin(p, work, place);
    convert(state, operand);
    u32 words[4][4];  // out, or delta, of the chunk before
    for (int chunk = work.begin; chunk < work.end; ++chunk, pipe.advance()) {
      const int tokens = work.tokens(chunk);
      const u32 stage = pipe.buffer();
      pipe.wait_full();
      if (tokens < delta_chunk) clear_rows(stage + Scan::k_at, tokens);
      wgmma_fence();
      issue_state_product(sum, stage + Scan::k_at);
      if constexpr (c.keeps) keep(p, work, chunk, out_buffer, words, true);
      if constexpr (c.has_out()) {
        issue_state_product(out, stage + Scan::q_at);
        if (chunk > work.begin)
          store_rows(f, f.out, work, out_buffer, words, work.row + (chunk - 1) * delta_chunk,
                     delta_chunk);
      }
      const u32 factors = stage + Scan::factors_at;
      wgmma_wait<c.has_out() ? 1 : 0>();
      u32 values[4][4];
      find_error(values, work, stage, tokens);
      wgmma_fence();
      issue_chunk_product(sum, values, stage + Scan::inverse_at, false);
      wgmma_wait<1>();
      if constexpr (c.has_out()) {
#pragma unroll
        for (int n = 0; n < delta_chunk / 8; ++n) {
          const float2 decay = load_shared_pair(
              factors + (factor_at(delta_factor::read) + 8 * n + own_column()) * 4);
          out[4 * n] *= decay.x;
          out[4 * n + 1] *= decay.y;
          out[4 * n + 2] *= decay.x;
          out[4 * n + 3] *= decay.y;
        }
      }
      // The state is no operand: that is its copy in bf16.
      const float last = load_shared_float(factors + factor_at(delta_factor::last) * 4);
#pragma unroll
      for (int j = 0; j < features / 2; ++j) state[j] *= last;
      wgmma_wait<0>();
      u32 rest[4][4];  // r delta
      convert(sum, values);
#pragma unroll
      for (int n = 0; n < delta_chunk / 8; ++n) {
        const float2 decay =
            load_shared_pair(factors + (factor_at(delta_factor::write) + 8 * n + own_column()) * 4);
        rest[n / 2][n % 2 * 2] = pack<T>(decay.x * sum[4 * n], decay.y * sum[4 * n + 1]);
        rest[n / 2][n % 2 * 2 + 1] = pack<T>(decay.x * sum[4 * n + 2], decay.y * sum[4 * n + 3]);
      }
      wgmma_fence();
      issue_write(rest, stage + Scan::k_at);
      wgmma_commit();
      if constexpr (!c.has_out()) {
        if constexpr (c.keeps) {
#pragma unroll
          for (int i = 0; i < 16; ++i) words[i / 4][i % 4] = values[i / 4][i % 4];
        }
        wgmma_wait<0>();
        convert(state, operand);
      } else {
        issue_chunk_product(out, values, stage + Scan::read_at, true);
        wgmma_wait<1>();
        convert(state, operand);
        wgmma_wait<0>();
        convert(out, words);
      }
      __syncwarp();
      if (lane() == 0) barrier_arrive(pipe.empty_barrier());
    }
    if constexpr (c.has_out()) {
      if (work.begin < work.end)
        store_rows(f, f.out, work, out_buffer, words, work.row + (work.end - 1) * delta_chunk,
                   work.tokens(work.end - 1));
    }
    if constexpr (c.keeps) {
      if (work.begin < work.end) keep(p, work, work.end, out_buffer, words, false);
      if (Warpgroup::is_first()) tma_store_wait<0>();
    }
    end(p, work, place);
  }

 private:
  // Stores the state before a chunk, and delta of the chunk before.
  __device__ __forceinline__ void keep(const delta_chunk_params& p,
                                       const delta_scan_work<form, c>& work, int chunk,
                                       u32 out_buffer, const u32 (&words)[4][4], bool has_state) {
    const u32 buffer = out_buffer + (Scan::kept_at - Scan::out_at) +
                       warpgroup() * (Scan::kept_bytes - Scan::slab_bytes);
    if (Warpgroup::is_first()) tma_store_wait_read<0>();
    Warpgroup::sync();
    if (has_state) Warpgroup::store_operand(buffer);
    if (chunk > work.begin) Warpgroup::store_transposed(out_buffer, words);
    async_proxy_fence();
    Warpgroup::sync();
    if (!Warpgroup::is_first()) return;
    if (has_state)
      bulk_store(Warpgroup::tile_of(p.states, p.layer, work, chunk, form.dim), buffer,
                 Scan::kept_bytes);
    if (chunk > work.begin)
      bulk_store(Warpgroup::tile_of(p.deltas, p.layer, work, chunk - 1, 64), out_buffer,
                 Scan::slab_bytes);
    tma_store_commit();
  }
};

template <delta_rule_form form, delta_scan_config c>
__global__ void __launch_bounds__(128 * (c.warpgroups + 1), 1)
    delta_rule_scan(const __grid_constant__ delta_chunk_params p) {
  using Scan = delta_scan<form, c>;
  extern __shared__ __align__(1024) char memory[];
  const u32 base = shared_address(memory);
  const auto pipe = start_stages<form, c>(base);
  wait_and_launch_dependents();
  const delta_scan_work<form, c> work(p.layer);
  // No chunks: nothing to do but for the first segment, whose state stays, and of `transfer`
  // nothing.
  if (work.begin == work.end && (c.transfer || work.segment > 0)) return;
  if (c.transfer && work.of_a && work.segment == 0) return;  // it begins with its own state
  if (produce_chunks<form, c>(p, work, pipe)) return;
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  if (work.sequence.state < 0) {
    // Padding: zeros.
    using T = element_type<form.type>;
    for (i64 i = threadIdx.x % 128; i < (work.sequence.end - work.sequence.first) * i64{64};
         i += 128) {
      const i64 row = work.row + i / 64;
      static_cast<T*>(p.layer.out)[(row * p.layer.v_heads + work.head) * form.v_dim + work.first_v +
                                   64 * warpgroup + i % 64] = from_float<T>(0.0f);
    }
    return;
  }
  delta_walk<form, c> walk;
  walk.run(p, work, pipe, base + Scan::out_at + warpgroup * Scan::slab_bytes);
}

// Where segments begin, in the place of B of the segment before: S = S A + B from the second
// segment on. A CTA has 8 rows of v, a thread a feature of k. Grid: sequences * v_heads * v_dim
// / 8.
template <delta_rule_form form, int segments>
__global__ void __launch_bounds__(form.dim)
    delta_rule_join(const __grid_constant__ delta_chunk_params p) {
  constexpr int rows = 8, blocks = form.v_dim / rows;
  constexpr i64 stride = static_cast<i64>(form.v_dim + form.dim) * form.dim;
  __shared__ float shared[rows][form.dim];
  wait_and_launch_dependents();
  const int block = static_cast<int>(blockIdx.x) % blocks;
  const int of_head = static_cast<int>(blockIdx.x) / blocks;
  const delta_rule_sequence sequence = sequence_of(p.layer, of_head / p.layer.v_heads);
  if (sequence.state < 0) return;
  const int chunks = ceil_div(sequence.end - sequence.first, delta_chunk);
  const int each = ceil_div(chunks, segments), column = static_cast<int>(threadIdx.x);
  float* transfer = p.transfers + of_head * (segments - 1) * stride;
  float state[rows];
  for (int segment = 0; segment < segments - 1; ++segment, transfer += stride) {
    if (segment * each >= chunks) return;
    float* const own = transfer + block * rows * form.dim + column;
    float next[rows];
#pragma unroll
    for (int row = 0; row < rows; ++row) next[row] = own[row * form.dim];
    if (segment > 0) {
      __syncthreads();
#pragma unroll
      for (int row = 0; row < rows; ++row) shared[row][column] = state[row];
      __syncthreads();
      const float* const a = transfer + form.v_dim * form.dim + column;
#pragma unroll 16
      for (int i = 0; i < form.dim; ++i) {
        const float factor = a[i * form.dim];
#pragma unroll
        for (int row = 0; row < rows; ++row) next[row] += shared[row][i] * factor;
      }
    }
#pragma unroll
    for (int row = 0; row < rows; ++row) own[row * form.dim] = state[row] = next[row];
  }
}

}  // namespace fftune
