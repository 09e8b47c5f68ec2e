// The gradients of a chunk's tokens in ssd, for bf16, with mma.sync. Walks (chunks.cu) keep the
// state S before each chunk, and dS, the gradient of the state behind it. A CTA has a chunk of a
// head, a warp 16 of its tokens: with G the sums of dt A, x times dt, and W = d_out xᵀ,
//
//   dC = (W exp(G_i - G_j)) B + exp(G) d_out S             of the tokens i
//   dB = (W exp(G_i - G_j))ᵀ C + exp(G_last - G) x dS      of the tokens j
//   dx = Mᵀ d_out + exp(G_last - G) B dSᵀ                  M = C Bᵀ exp(G_i - G_j)
//
// The gradient of dt A of a token is the sum of W M over pairs that the token is between, of C ·
// (exp(G) d_out S) from the token on, of B · (exp(G_last - G) x dS) before it, and of exp(G_last)
// dS · S. Rows of W and of its transpose are computed apart, so that each is an operand A in
// registers.
//
// Grid: chunks * heads. Gradients of B and C of a head, and sums for dt, D and A go to memory in
// fp32; kernels of recurrent_backward.cu add them up.
#include "common/async.cuh"
#include "common/mma.cuh"
#include "ssd/chunks.cuh"
#include "ssd/recurrent_tile.cuh"

namespace fftune {

template <ssd_form form>
struct ssd_chunk_tokens {
  static constexpr ssd_token_plan plan = ssd_token_plan_of(form.dim, form.state_dim);
  static constexpr int threads = 32 * ssd_chunk_warps;
  static constexpr float least_decay = -110.0f;
  // Arrays of 64 floats.
  enum { at_sum, at_dt, at_pairs, at_read, at_written, at_step, at_skip, at_columns };
  static_assert(at_columns + ssd_chunk_warps + 1 <= ssd_token_arrays);

  u32 shared;
  float* arrays;
  int thread = static_cast<int>(threadIdx.x);
  int warp = thread / 32, lane = thread % 32;
  int group = lane / 4, pair = lane % 4;

  __device__ __forceinline__ float* array(int which) const { return arrays + which * ssd_chunk; }

  // [rows, columns] of bf16 to a tile; zeros behind `there` rows.
  __device__ __forceinline__ void copy(int tile, int row_bytes, const bf16* from, i64 row, int rows,
                                       int columns, int there) const {
    const int vectors = columns / 8;
    for (int i = thread; i < rows * vectors; i += threads) {
      const int r = i / vectors, v = i % vectors * 8;
      copy_async(shared + static_cast<u32>(tile + r * row_bytes + 2 * v),
                 from + (r < there ? r * row : 0) + v, r < there);
    }
  }
  // As in chunks.cu: the address of a lane's row of four 8x8 matrices.
  __device__ __forceinline__ u32 matrices(int tile, int row_bytes, int row, int column,
                                          bool across) const {
    const int low = lane / 8 % 2 * 8, high = lane / 16 * 8;
    return shared + static_cast<u32>(tile + (row + lane % 8 + (across ? high : low)) * row_bytes +
                                     2 * (column + (across ? low : high)));
  }
  // An element pair of a row of a tile.
  __device__ __forceinline__ void pair_of(int tile, int row_bytes, int row, int column, float& low,
                                          float& high) const {
    unpack<bf16>(load_shared_word(shared + static_cast<u32>(tile + row * row_bytes + 2 * column)),
                 low, high);
  }

  // sums += (16 rows of a tile from `row` on) · right: right [tiles * 8, depth] by rows, or with
  // `across` [depth, tiles * 8].
  template <bool across, int tiles>
  __device__ __forceinline__ void multiply(float (&sums)[tiles][4], int left, int left_bytes,
                                           int row, int right, int right_bytes, int depth,
                                           int first = 0, int end = tiles) const {
#pragma unroll 2
    for (int k = 0; k < depth; k += 16) {
      u32 a[4];
      load_matrices(a[0], a[1], a[2], a[3], matrices(left, left_bytes, row, k, false));
#pragma unroll
      for (int tile = 0; tile < tiles; tile += 2) {
        if (tile < first || tile >= end) continue;
        u32 b[2][2];
        if constexpr (across) {
          load_matrices_transposed(b[0][0], b[0][1], b[1][0], b[1][1],
                                   matrices(right, right_bytes, k, 8 * tile, false));
        } else {
          load_matrices(b[0][0], b[0][1], b[1][0], b[1][1],
                        matrices(right, right_bytes, 8 * tile, k, true));
        }
        mma_16x8x16<bf16>(sums[tile], a, b[0]);
        mma_16x8x16<bf16>(sums[tile + 1], a, b[1]);
      }
    }
  }
  // The same with an operand A in registers, of tokens [16 first, 16 end).
  template <int tiles>
  __device__ __forceinline__ void multiply_registers(float (&sums)[tiles][4],
                                                     const u32 (&left)[ssd_chunk / 16][4],
                                                     int right, int right_bytes, int first,
                                                     int end) const {
#pragma unroll
    for (int k = 0; k < ssd_chunk / 16; ++k) {
      if (k < first || k >= end) continue;
#pragma unroll
      for (int tile = 0; tile < tiles; tile += 2) {
        u32 b[2][2];
        load_matrices_transposed(b[0][0], b[0][1], b[1][0], b[1][1],
                                 matrices(right, right_bytes, 16 * k, 8 * tile, false));
        mma_16x8x16<bf16>(sums[tile], left[k], b[0]);
        mma_16x8x16<bf16>(sums[tile + 1], left[k], b[1]);
      }
    }
  }
  template <int tiles>
  static __device__ __forceinline__ void scale_rows(float (&sums)[tiles][4],
                                                    const float (&factor)[2]) {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[tile][i] *= factor[i / 2];
    }
  }
  // The products of the warp's rows with rows of a tile, to an array.
  template <int tiles>
  __device__ __forceinline__ void dot_rows(const float (&sums)[tiles][4], int tile_of_rows,
                                           int row_bytes, float* to) const {
    float dots[2] = {};
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float low, high;
        pair_of(tile_of_rows, row_bytes, token(half), 8 * tile + 2 * pair, low, high);
        dots[half] += sums[tile][2 * half] * low + sums[tile][2 * half + 1] * high;
      }
    }
    write_rows(dots, to);
  }
  // Adds up over the lanes of a row.
  __device__ __forceinline__ void write_rows(float (&values)[2], float* to) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      values[half] += __shfl_xor_sync(~0u, values[half], 1);
      values[half] += __shfl_xor_sync(~0u, values[half], 2);
      if (pair == 0) to[token(half)] = values[half];
    }
  }
  template <int tiles>
  __device__ __forceinline__ void store_rows(const float (&sums)[tiles][4], float* to, i64 row,
                                             int there) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (token(half) >= there) continue;
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile)
        *reinterpret_cast<float2*>(to + token(half) * row + 8 * tile + 2 * pair) = {
            number(sums[tile][2 * half]), number(sums[tile][2 * half + 1])};
    }
  }
  // The warp's tokens, as rows of fragments.
  __device__ __forceinline__ int token(int half) const {
    return 16 * warp + group + 8 * half;
  }

  // --- The kernel of a chunk and head ---

  static constexpr int token_tiles = ssd_chunk / 8, n_tiles = form.state_dim / 8;
  static constexpr int x_tiles = form.dim / 8;
  using token_fragments = u32[ssd_chunk / 16][4];

  struct place_of_cta {
    int slot, head;
    delta_chunk_place place;

    __device__ __forceinline__ place_of_cta(const delta_rule_params& f)
        : slot(static_cast<int>(blockIdx.x) / f.v_heads),
          head(static_cast<int>(blockIdx.x) % f.v_heads),
          place(chunk_of_slot(f, slot)) {}
  };

  __device__ __forceinline__ void load(const ssd_backward_params& params,
                                       const place_of_cta& cta) const {
    const delta_backward_params& p = params.back;
    const delta_rule_params& f = p.forward;
    const int there = cta.place.tokens;
    const int of_group = cta.head / (f.v_heads / f.heads) * form.state_dim;
    const i64 of_head = static_cast<i64>(cta.head) * form.dim, out_row = f.v_heads * form.dim;
    const i64 state =
        (static_cast<i64>(cta.slot) * f.v_heads + cta.head) * form.dim * form.state_dim;
    copy(0, plan.state_row, static_cast<const bf16*>(f.k) + cta.place.row * f.k_row + of_group,
         f.k_row, ssd_chunk, form.state_dim, there);
    copy(plan.C, plan.state_row, static_cast<const bf16*>(f.q) + cta.place.row * f.q_row + of_group,
         f.q_row, ssd_chunk, form.state_dim, there);
    copy(plan.x, plan.x_row, static_cast<const bf16*>(f.v) + cta.place.row * f.v_row + of_head,
         f.v_row, ssd_chunk, form.dim, there);
    copy(plan.d_out, plan.x_row,
         static_cast<const bf16*>(p.d_out) + cta.place.row * out_row + of_head, out_row, ssd_chunk,
         form.dim, there);
    copy(plan.S, plan.state_row, static_cast<const bf16*>(params.states) + state, form.state_dim,
         form.dim, form.state_dim, form.dim);
    copy(plan.dS, plan.state_row, static_cast<const bf16*>(params.d_states) + state, form.state_dim,
         form.dim, form.state_dim, form.dim);
    copy_async_commit();
  }

  // Steps and sums of the logs of decays, by one warp: two tokens in each lane.
  __device__ __forceinline__ void find_decays(const delta_rule_params& f, const place_of_cta& cta,
                                              const ssd_head<form>& parameters) const {
    const int there = cta.place.tokens;
    float sum[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = 2 * lane + i;
      const bf16* const input = static_cast<const bf16*>(f.gate) +
                                (cta.place.row + (at < there ? at : 0)) * f.g_row + cta.head;
      const float dt = at < there ? parameters.step(to_float(*input)).dt : 0.0f;
      sum[i] = at < there ? dt * parameters.A : 0.0f;
      if (sum[i] < least_decay) sum[i] = least_decay;
      array(at_dt)[at] = dt;
    }
    sum[1] += sum[0];
    float before = sum[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_up_sync(~0u, before, distance);
      if (lane >= distance) before += other;
    }
    before = __shfl_up_sync(~0u, before, 1);
    if (lane == 0) before = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) array(at_sum)[2 * lane + i] = before + sum[i];
  }

  // Those of all tokens, and of this thread's two.
  struct decays {
    const float* sums;
    const float* steps;
    float sum[2], dt[2], last, read[2], write[2];

    __device__ __forceinline__ decays(const ssd_chunk_tokens& t)
        : sums(t.array(at_sum)),
          steps(t.array(at_dt)),
          sum{sums[t.token(0)], sums[t.token(1)]},
          dt{steps[t.token(0)], steps[t.token(1)]},
          last(sums[ssd_chunk - 1]),
          read{expf(sum[0]), expf(sum[1])},
          write{expf(last - sum[0]), expf(last - sum[1])} {}
  };

  // Rows i: tokens that read. The gradient of C goes to `to`.
  __device__ __forceinline__ void find_dC(const decays& of, float* to, i64 token_row,
                                          int there) const {
    const int own = 16 * warp;
    float products[token_tiles][4] = {}, w[token_tiles][4] = {};
    multiply<false>(products, plan.C, plan.state_row, own, 0, plan.state_row, form.state_dim, 0,
                    2 * warp + 2);
    multiply<false>(w, plan.d_out, plan.x_row, own, plan.x, plan.x_row, form.dim, 0, 2 * warp + 2);
    u32 left[ssd_chunk / 16][4];
    float rows[2] = {};
#pragma unroll
    for (int tile = 0; tile < token_tiles; ++tile) {
      const int column = 8 * tile + 2 * pair;
      float scaled[4], columns[2] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = column + i % 2, at = token(i / 2);
        scaled[i] = j <= at ? w[tile][i] * (expf(of.sum[i / 2] - of.sums[j]) * of.steps[j]) : 0.0f;
        const float m = j < at ? scaled[i] * products[tile][i] : 0.0f;
        rows[i / 2] += m;
        columns[i % 2] += m;
      }
      left[tile / 2][tile % 2 * 2] = pack<bf16>(scaled[0], scaled[1]);
      left[tile / 2][tile % 2 * 2 + 1] = pack<bf16>(scaled[2], scaled[3]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          columns[i] += __shfl_xor_sync(~0u, columns[i], distance);
        if (group == 0) array(at_columns + warp)[column + i] = columns[i];
      }
    }
    write_rows(rows, array(at_pairs));
    float dC[n_tiles][4] = {};
    multiply<true>(dC, plan.d_out, plan.x_row, own, plan.S, plan.state_row, form.dim);
    scale_rows(dC, of.read);
    dot_rows(dC, plan.C, plan.state_row, array(at_read));
    multiply_registers(dC, left, 0, plan.state_row, 0, warp + 1);
    store_rows(dC, to, token_row, there);
  }

  // Rows j: tokens that write. The matrices of their dx and of their gradient of B.
  __device__ __forceinline__ void multiply_writes(const decays& of, token_fragments& left,
                                                  token_fragments& of_x) const {
    const int own = 16 * warp;
    float products[token_tiles][4] = {}, w[token_tiles][4] = {};
    multiply<false>(products, 0, plan.state_row, own, plan.C, plan.state_row, form.state_dim,
                    2 * warp, token_tiles);
    multiply<false>(w, plan.x, plan.x_row, own, plan.d_out, plan.x_row, form.dim, 2 * warp,
                    token_tiles);
#pragma unroll
    for (int tile = 0; tile < token_tiles; ++tile) {
      const int column = 8 * tile + 2 * pair;
      float scaled[4], m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = column + i % 2, j = token(i / 2);
        const float decay = j <= at ? expf(of.sums[at] - of.sum[i / 2]) : 0.0f;
        scaled[i] = j <= at ? w[tile][i] * (decay * of.dt[i / 2]) : 0.0f;
        m[i] = j <= at ? products[tile][i] * decay : 0.0f;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        left[tile / 2][tile % 2 * 2 + half] = pack<bf16>(scaled[2 * half], scaled[2 * half + 1]);
        of_x[tile / 2][tile % 2 * 2 + half] = pack<bf16>(m[2 * half], m[2 * half + 1]);
      }
    }
  }
  __device__ __forceinline__ void find_dx(const delta_backward_params& p, const place_of_cta& cta,
                                          const decays& of, const ssd_head<form>& parameters,
                                          const token_fragments& of_x) const {
    const delta_rule_params& f = p.forward;
    const int own = 16 * warp, there = cta.place.tokens;
    float dx[x_tiles][4] = {};
    multiply<false>(dx, 0, plan.state_row, own, plan.dS, plan.state_row, form.state_dim);
    scale_rows(dx, of.write);
    multiply_registers(dx, of_x, plan.d_out, plan.x_row, warp, ssd_chunk / 16);
    dot_rows(dx, plan.x, plan.x_row, array(at_step));
    float skips[2] = {};
    bf16* const to = static_cast<bf16*>(p.dv) + (cta.place.row * f.v_heads + cta.head) * form.dim;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < x_tiles; ++tile) {
        const int v = 8 * tile + 2 * pair;
        float x_low, x_high, dy_low, dy_high;
        pair_of(plan.x, plan.x_row, token(half), v, x_low, x_high);
        pair_of(plan.d_out, plan.x_row, token(half), v, dy_low, dy_high);
        skips[half] += x_low * dy_low + x_high * dy_high;
        float low = number(of.dt[half] * dx[tile][2 * half]);
        float high = number(of.dt[half] * dx[tile][2 * half + 1]);
        if constexpr (form.skip) {
          low += parameters.D * dy_low;
          high += parameters.D * dy_high;
        }
        if (token(half) < there)
          *reinterpret_cast<u32*>(to + static_cast<i64>(token(half)) * f.v_heads * form.dim + v) =
              pack<bf16>(low, high);
      }
    }
    write_rows(skips, array(at_skip));
  }
  __device__ __forceinline__ void find_dB(const decays& of, const token_fragments& left, float* to,
                                          i64 token_row, int there) const {
    const int own = 16 * warp;
    float dB[n_tiles][4] = {};
    multiply<true>(dB, plan.x, plan.x_row, own, plan.dS, plan.state_row, form.dim);
    const float factor[2] = {of.write[0] * of.dt[0], of.write[1] * of.dt[1]};
    scale_rows(dB, factor);
    dot_rows(dB, 0, plan.state_row, array(at_written));
    multiply_registers(dB, left, plan.C, plan.state_row, warp, ssd_chunk / 16);
    store_rows(dB, to, token_row, there);
  }

  // dS · S of each warp, in the order of the threads.
  __device__ __forceinline__ void dot_states(float* of_warps) const {
    float of_state = 0.0f;
    for (int i = thread; i < form.dim * form.state_dim / 2; i += threads) {
      const int row = i / (form.state_dim / 2), column = i % (form.state_dim / 2) * 2;
      float low, high, d_low, d_high;
      pair_of(plan.S, plan.state_row, row, column, low, high);
      pair_of(plan.dS, plan.state_row, row, column, d_low, d_high);
      of_state += low * d_low + high * d_high;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      of_state += __shfl_xor_sync(~0u, of_state, distance);
    if (lane == 0) of_warps[warp] = of_state;
  }

  // The gradients of dt A, sums from a token on and before it, of dt and of D: by one warp.
  __device__ __forceinline__ void find_steps(const delta_backward_params& p,
                                             const place_of_cta& cta, const float* of_warps,
                                             float last) const {
    const delta_rule_params& f = p.forward;
    const int there = cta.place.tokens;
    float of_state = 0.0f;
#pragma unroll
    for (int w = 0; w < ssd_chunk_warps; ++w) of_state += of_warps[w];
    float from_here[2], written[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = 2 * lane + i;
      from_here[i] = array(at_read)[at] + array(at_pairs)[at];
#pragma unroll
      for (int w = 0; w < ssd_chunk_warps; ++w) from_here[i] -= array(at_columns + w)[at];
      written[i] = array(at_written)[at];
    }
    float behind = from_here[0] + from_here[1], before = written[0] + written[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float next = __shfl_down_sync(~0u, behind, distance);
      const float previous = __shfl_up_sync(~0u, before, distance);
      if (lane + distance < 32) behind += next;
      if (lane >= distance) before += previous;
    }
    behind = __shfl_down_sync(~0u, behind, 1);
    before = __shfl_up_sync(~0u, before, 1);
    if (lane == 31) behind = 0.0f;
    if (lane == 0) before = 0.0f;
    const float kept = expf(last) * of_state;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = 2 * lane + i;
      if (at >= there) continue;
      const float of_decay =
          kept + before + (i == 0 ? from_here[0] : written[0]) + from_here[1] + behind;
      float* const to = p.gate_sums + ((cta.place.row + at) * f.v_heads + cta.head) * 3;
      to[0] = number(of_decay);
      to[1] = number(array(at_step)[at]);
      to[2] = number(array(at_skip)[at]);
    }
  }
};

// Grid: chunk slots * heads.
template <ssd_form form>
__global__ void __launch_bounds__(32 * ssd_chunk_warps)
    ssd_chunk_tokens_backward(const __grid_constant__ ssd_backward_params params) {
  using Tokens = ssd_chunk_tokens<form>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  wait_and_launch_dependents();
  const delta_backward_params& p = params.back;
  const delta_rule_params& f = p.forward;
  const typename Tokens::place_of_cta cta(f);
  if (cta.place.tokens <= 0) return;
  const Tokens t{shared_address(shared_memory),
                 reinterpret_cast<float*>(shared_memory + Tokens::plan.arrays)};
  t.load(params, cta);
  const ssd_head<form> parameters(params, f, cta.head);
  if (t.warp == 0) t.find_decays(f, cta, parameters);
  copy_async_wait<0>();
  __syncthreads();

  const typename Tokens::decays of(t);
  float* const row_sums = p.row_sums + (cta.place.row * f.v_heads + cta.head) * 2 * form.state_dim;
  const i64 token_row = static_cast<i64>(f.v_heads) * 2 * form.state_dim;
  t.find_dC(of, row_sums, token_row, cta.place.tokens);
  {
    typename Tokens::token_fragments left, of_x;
    t.multiply_writes(of, left, of_x);
    t.find_dx(p, cta, of, parameters, of_x);
    t.find_dB(of, left, row_sums + form.state_dim, token_row, cta.place.tokens);
  }
  float* const of_warps = t.array(Tokens::at_columns + ssd_chunk_warps);
  t.dot_states(of_warps);
  __syncthreads();
  if (t.warp == 0) t.find_steps(p, cta, of_warps, of.last);
}

}  // namespace fftune
