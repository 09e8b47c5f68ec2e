// ssd by chunks of 64 tokens with mma.sync, for bf16. A CTA walks over the chunks of a sequence
// with `rows` rows of a head's state in the accumulators of its warps. With G the sums of dt A in
// the chunk, and S the state before it:
//
//   out = M x + exp(G) C Sᵀ,   M = C Bᵀ exp(G_i - G_j) dt_j for i >= j
//   S   = exp(G_last) S + (exp(G_last - G_j) dt_j x_j)ᵀ B_j
//
//   cp.async      shared memory                    warp w of 4
//   chunk k + 1   stages: B | C [64, state-dim],   C Bᵀ, C Sᵀ and M x of tokens 16 w .. 16 w + 15;
//      ------>    x [64, rows]                     M stays in registers, as operand A
//                 S [rows, state-dim] in bf16      S of 16 rows, and of state-dim * rows / 64
//                 features factors of the chunk's tokens
//
//   barriers: before a chunk is read, when it has arrived and S and its factors are written; and
//   behind it, before its stage, S and the factors are overwritten
//
// Grid: sequences * heads * ceil(dim / rows), the blocks of a head and the heads of a group next to
// each other: they read the same B and C.
#include "common/async.cuh"
#include "common/mma.cuh"
#include "ssd/chunks.cuh"
#include "ssd/recurrent_tile.cuh"

namespace fftune {

template <ssd_form form, ssd_chunk_config c>
struct ssd_chunks {
  static constexpr ssd_chunk_plan plan = ssd_chunk_plan_of(form.state_dim, c);
  static constexpr int threads = 32 * ssd_chunk_warps;
  static constexpr int row_tiles = c.rows / 16;              // of S
  static constexpr int parts = ssd_chunk_warps / row_tiles;  // of S's features
  static constexpr int features = form.state_dim / parts;    // of a warp's part
  static_assert(form.type == element::bf16 && form.dim % 8 == 0 && features % 16 == 0);

  // Products of a decay that is 0 stay 0, and sums exact enough.
  static constexpr float least_decay = -110.0f;

  const delta_rule_params& p;
  const ssd_head<form> head_parameters;
  const bf16* matrix;  // B, or C on the way back
  const bf16* vector;  // x, or d_out
  i64 matrix_row, vector_row;
  int head, first_row_of_state;  // of the CTA
  i64 first, end;                // rows of tokens
  u32 shared;
  float* factors;  // [4][64]: G, dt, exp(G), exp(G_last - G) dt

  int thread = static_cast<int>(threadIdx.x);
  int warp = thread / 32, lane = thread % 32;
  int group = lane / 4, pair = lane % 4;

  float state[features / 8]
             [4];  // rows 16 (warp % row_tiles) + group (+ 8), features 8 i + 2 pair..

  __device__ __forceinline__ int state_row(int half) const {
    return warp % row_tiles * 16 + group + 8 * half;
  }
  __device__ __forceinline__ int state_feature(int tile) const {
    return warp / row_tiles * features + 8 * tile + 2 * pair;
  }
  // The place of the chunk of a step.
  __device__ __forceinline__ u32 stage(int step) const {
    return shared + static_cast<u32>(step % c.stages) * plan.stage;
  }

  // Starts the copies of a chunk; zeros stand for tokens and rows that there are not.
  __device__ __forceinline__ void copy(i64 chunk, int step) const {
    const i64 begin = first + chunk * ssd_chunk;
    const int of_group = head / (p.v_heads / p.heads) * form.state_dim;
    const u32 to = stage(step);
    constexpr int vectors = form.state_dim / 8, x_vectors = c.rows / 8;
    const bf16* const C = static_cast<const bf16*>(p.q) + of_group;
    const bf16* const x = vector + static_cast<i64>(head) * form.dim + first_row_of_state;
    for (int i = thread; i < ssd_chunk * vectors; i += threads) {
      const int token = i / vectors, n = i % vectors * 8;
      const bool is_there = begin + token < end;
      const i64 row = is_there ? begin + token : begin;
      const u32 at = to + static_cast<u32>(token * plan.state_row + 2 * n);
      copy_async(at, matrix + of_group + row * matrix_row + n, is_there);
      if constexpr (c.walk == ssd_walk::out)
        copy_async(at + plan.c_tile, C + row * p.q_row + n, is_there);
    }
    for (int i = thread; i < ssd_chunk * x_vectors; i += threads) {
      const int token = i / x_vectors, v = i % x_vectors * 8;
      const bool is_there = begin + token < end && first_row_of_state + v < form.dim;
      const i64 row = is_there ? begin + token : begin;
      copy_async(to + static_cast<u32>(plan.x_tile + token * plan.x_row + 2 * v),
                 x + row * vector_row + (is_there ? v : 0), is_there);
    }
  }

  // The steps of the two tokens of a lane of warp 0, as they are in memory; 0 behind the last one.
  __device__ __forceinline__ void load_steps(i64 chunk, float (&input)[2]) const {
    const bf16* const dt = static_cast<const bf16*>(p.gate) + head;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const i64 row = first + chunk * ssd_chunk + 2 * lane + i;
      input[i] = row < end ? to_float(dt[row * p.g_row]) : 0.0f;
    }
  }
  __device__ __forceinline__ void write_factors(i64 chunk, const float (&input)[2]) const {
    float dt[2], sum[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool is_there = first + chunk * ssd_chunk + 2 * lane + i < end;
      dt[i] = is_there ? head_parameters.step(input[i]).dt : 0.0f;
      sum[i] = is_there ? dt[i] * head_parameters.A : 0.0f;
      // A NaN stays.
      if (sum[i] < least_decay) sum[i] = least_decay;
    }
    sum[1] += sum[0];
    float before = sum[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_up_sync(~0u, before, distance);
      if (lane >= distance) before += other;
    }
    const float last = __shfl_sync(~0u, before, 31);
    before = __shfl_up_sync(~0u, before, 1);
    if (lane == 0) before = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = 2 * lane + i;
      const float total = before + sum[i];
      factors[at] = total;
      factors[ssd_chunk + at] = dt[i];
      factors[2 * ssd_chunk + at] = expf(total);
      factors[3 * ssd_chunk + at] =
          c.walk == ssd_walk::back ? expf(total) : expf(last - total) * dt[i];
    }
  }

  template <class State>
  __device__ __forceinline__ void load_state(const State* from) {
#pragma unroll
    for (int tile = 0; tile < features / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = first_row_of_state + state_row(i / 2);
        state[tile][i] =
            from != nullptr && row < form.dim
                ? to_float(
                      from[static_cast<i64>(row) * form.state_dim + state_feature(tile) + i % 2])
                : 0.0f;
      }
    }
  }
  template <class State>
  __device__ __forceinline__ void store_state(State* to) const {
#pragma unroll
    for (int tile = 0; tile < features / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = first_row_of_state + state_row(i / 2);
        if (row < form.dim)
          to[static_cast<i64>(row) * form.state_dim + state_feature(tile) + i % 2] =
              from_float<State>(number(state[tile][i]));
      }
    }
  }
  __device__ __forceinline__ void share_state() const {
#pragma unroll
    for (int tile = 0; tile < features / 8; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_shared(shared + static_cast<u32>(plan.state_tile + state_row(half) * plan.state_row +
                                               2 * state_feature(tile)),
                     pack<bf16>(state[tile][2 * half], state[tile][2 * half + 1]));
    }
  }

  // The address of a lane's row of four 8x8 matrices of a tile: two by rows, then two by columns,
  // or with `across` two by columns first.
  __device__ __forceinline__ u32 matrices(u32 tile, int row_bytes, int row, int column,
                                          bool across) const {
    const int low = lane / 8 % 2 * 8, high = lane / 16 * 8;
    return tile + static_cast<u32>((row + lane % 8 + (across ? high : low)) * row_bytes +
                                   2 * (column + (across ? low : high)));
  }

  __device__ __forceinline__ void walk(i64 chunk, int step) {
    if constexpr (c.walk == ssd_walk::out) write_out(chunk, step);
    const u32 B = stage(step), x = B + plan.x_tile;
    // The state behind the chunk, or before it.
    const float kept = factors[2 * ssd_chunk + ssd_chunk - 1];
#pragma unroll
    for (int tile = 0; tile < features / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state[tile][i] *= kept;
    }
    const int first_row = warp % row_tiles * 16, first_feature = warp / row_tiles * features;
#pragma unroll
    for (int k = 0; k < ssd_chunk; k += 16) {
      u32 a[4];
      load_matrices_transposed(a[0], a[1], a[2], a[3], matrices(x, plan.x_row, k, first_row, true));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const factor = factors + 3 * ssd_chunk + k + i / 2 * 8 + 2 * pair;
        float low, high;
        unpack<bf16>(a[i], low, high);
        a[i] = pack<bf16>(low * factor[0], high * factor[1]);
      }
#pragma unroll
      for (int tile = 0; tile < features / 8; tile += 2) {
        u32 b[2][2];
        load_matrices_transposed(b[0][0], b[0][1], b[1][0], b[1][1],
                                 matrices(B, plan.state_row, k, first_feature + 8 * tile, false));
        mma_16x8x16<bf16>(state[tile], a, b[0]);
        mma_16x8x16<bf16>(state[tile + 1], a, b[1]);
      }
    }
  }

  __device__ __forceinline__ void write_out(i64 chunk, int step) const {
    const u32 B = stage(step), C = B + plan.c_tile, x = B + plan.x_tile;
    const u32 S = shared + plan.state_tile;
    const int own = 16 * warp;  // the warp's first token
    constexpr int token_tiles = ssd_chunk / 8, out_tiles = c.rows / 8;

    // C Bᵀ up to the warp's last token, and C Sᵀ.
    float products[token_tiles][4] = {}, out[out_tiles][4] = {};
#pragma unroll 2
    for (int k = 0; k < form.state_dim; k += 16) {
      u32 a[4];
      load_matrices(a[0], a[1], a[2], a[3], matrices(C, plan.state_row, own, k, false));
#pragma unroll
      for (int tile = 0; tile < token_tiles; tile += 2) {
        if (8 * tile >= own + 16) break;
        u32 b[2][2];
        load_matrices(b[0][0], b[0][1], b[1][0], b[1][1],
                      matrices(B, plan.state_row, 8 * tile, k, true));
        mma_16x8x16<bf16>(products[tile], a, b[0]);
        mma_16x8x16<bf16>(products[tile + 1], a, b[1]);
      }
#pragma unroll
      for (int tile = 0; tile < out_tiles; tile += 2) {
        u32 b[2][2];
        load_matrices(b[0][0], b[0][1], b[1][0], b[1][1],
                      matrices(S, plan.state_row, 8 * tile, k, true));
        mma_16x8x16<bf16>(out[tile], a, b[0]);
        mma_16x8x16<bf16>(out[tile + 1], a, b[1]);
      }
    }

    const int token[2] = {own + group, own + group + 8};
    const float sum[2] = {factors[token[0]], factors[token[1]]};
    const float decay[2] = {factors[2 * ssd_chunk + token[0]], factors[2 * ssd_chunk + token[1]]};
#pragma unroll
    for (int tile = 0; tile < out_tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[tile][i] *= decay[i / 2];
    }
    // M, 16 tokens at a time, and M x.
#pragma unroll
    for (int k = 0; k < ssd_chunk; k += 16) {
      if (k > own) break;
      u32 a[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&product)[4] = products[k / 8 + half];
        const int column = k + 8 * half + 2 * pair;
        const float before[2] = {factors[column], factors[column + 1]};
        const float dt[2] = {factors[ssd_chunk + column], factors[ssd_chunk + column + 1]};
        float m[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          m[i] = column + i % 2 <= token[i / 2]
                     ? product[i] * (expf(sum[i / 2] - before[i % 2]) * dt[i % 2])
                     : 0.0f;
        a[2 * half] = pack<bf16>(m[0], m[1]);
        a[2 * half + 1] = pack<bf16>(m[2], m[3]);
      }
#pragma unroll
      for (int tile = 0; tile < out_tiles; tile += 2) {
        u32 b[2][2];
        load_matrices_transposed(b[0][0], b[0][1], b[1][0], b[1][1],
                                 matrices(x, plan.x_row, k, 8 * tile, false));
        mma_16x8x16<bf16>(out[tile], a, b[0]);
        mma_16x8x16<bf16>(out[tile + 1], a, b[1]);
      }
    }
    store_out(chunk, token, x, out);
  }

  __device__ __forceinline__ void store_out(i64 chunk, const int (&token)[2], u32 x,
                                            const float (&out)[c.rows / 8][4]) const {
    bf16* const to =
        static_cast<bf16*>(p.out) + static_cast<i64>(head) * form.dim + first_row_of_state;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 row = first + chunk * ssd_chunk + token[half];
      if (row >= end) continue;
#pragma unroll
      for (int tile = 0; tile < c.rows / 8; ++tile) {
        const int v = 8 * tile + 2 * pair;
        if (first_row_of_state + v >= form.dim) continue;
        float low = number(out[tile][2 * half]), high = number(out[tile][2 * half + 1]);
        if constexpr (form.skip) {
          float x_low, x_high;
          unpack<bf16>(load_shared_word(x + static_cast<u32>(token[half] * plan.x_row + 2 * v)),
                       x_low, x_high);
          low += head_parameters.D * x_low;
          high += head_parameters.D * x_high;
        }
        *reinterpret_cast<u32*>(to + row * p.v_heads * form.dim + v) = pack<bf16>(low, high);
      }
    }
  }
};

__device__ __forceinline__ const delta_rule_params& layer_of(const ssd_params& p) {
  return p.layer;
}
__device__ __forceinline__ const delta_rule_params& layer_of(const ssd_backward_params& p) {
  return p.back.forward;
}

template <ssd_form form, ssd_chunk_config c, class Params>
__global__ void __launch_bounds__(32 * ssd_chunk_warps)
    ssd_chunk_walk(const __grid_constant__ Params params) {
  using Walk = ssd_chunks<form, c>;
  using State = element_type<form.state>;
  constexpr bool is_back = c.walk == ssd_walk::back;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  wait_and_launch_dependents();
  const delta_rule_params& p = layer_of(params);
  constexpr int blocks = ceil_div(form.dim, c.rows);
  const int of_head = static_cast<int>(blockIdx.x) / blocks;
  const int index = of_head / p.v_heads, head = of_head - index * p.v_heads;
  const delta_rule_sequence sequence = sequence_of(p, index);
  const i64 first = first_row(p, sequence, index);
  const int block_row = static_cast<int>(blockIdx.x) % blocks * c.rows;
  const int count = sequence.end - sequence.first;
  if (c.walk == ssd_walk::out && sequence.state < 0) {
    for (int i = static_cast<int>(threadIdx.x); i < count * c.rows; i += Walk::threads) {
      const int v = block_row + i % c.rows;
      if (v < form.dim)
        static_cast<bf16*>(p.out)[((first + i / c.rows) * p.v_heads + head) * form.dim + v] =
            from_float<bf16>(0.0f);
    }
    return;
  }
  const void *matrix = p.k, *vector = p.v;
  i64 matrix_row = p.k_row, vector_row = p.v_row;
  if constexpr (is_back) {
    matrix = p.q, vector = params.back.d_out;
    matrix_row = p.q_row, vector_row = static_cast<i64>(p.v_heads) * form.dim;
  }
  Walk walk{p,
            ssd_head<form>(params, p, head),
            static_cast<const bf16*>(matrix),
            static_cast<const bf16*>(vector),
            matrix_row,
            vector_row,
            head,
            block_row,
            first,
            first + count,
            shared_address(shared_memory),
            reinterpret_cast<float*>(shared_memory + Walk::plan.factors)};
  const int chunks = ceil_div(count, ssd_chunk);
  const auto chunk_of = [chunks](int step) { return is_back ? chunks - 1 - step : step; };
#pragma unroll
  for (int step = 0; step < c.stages; ++step) {
    if (step < chunks) walk.copy(chunk_of(step), step);
    copy_async_commit();
  }
  const i64 of_state = static_cast<i64>(form.dim) * form.state_dim;
  const i64 place = sequence.state * p.state_block + head * of_state;
  if constexpr (is_back) {
    const float* const from = params.back.d_final_state;
    walk.load_state(from == nullptr ? nullptr : from + place);
  } else {
    const bool begins =
        p.state_in != nullptr && (p.has_state == nullptr || p.has_state[index] != 0);
    walk.load_state(begins ? static_cast<const State*>(p.state_in) + place : nullptr);
  }
  float inputs[2] = {};
  if (walk.warp == 0 && chunks > 0) walk.load_steps(chunk_of(0), inputs);
  for (int step = 0; step < chunks; ++step) {
    const int chunk = chunk_of(step);
    if constexpr (c.walk == ssd_walk::out) {
      walk.share_state();
    } else {
      const i64 number = (first_slot(p, index) + chunk) * p.v_heads + head;
      walk.store_state(static_cast<bf16*>(is_back ? params.d_states : params.states) +
                       number * of_state);
    }
    if (walk.warp == 0) {
      walk.write_factors(chunk, inputs);
      if (step + 1 < chunks) walk.load_steps(chunk_of(step + 1), inputs);
    }
    copy_async_wait<c.stages - 1>();
    __syncthreads();
    walk.walk(chunk, step);
    __syncthreads();
    if (step + c.stages < chunks) walk.copy(chunk_of(step + c.stages), step + c.stages);
    copy_async_commit();
  }
  if constexpr (is_back) {
    if (params.back.d_initial_state != nullptr)
      walk.store_state(params.back.d_initial_state + place);
  } else if constexpr (c.walk == ssd_walk::out) {
    if (p.state_out != nullptr) walk.store_state(static_cast<State*>(p.state_out) + place);
  }
}

}  // namespace fftune
