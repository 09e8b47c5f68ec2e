// The gradients of gated-delta-rule by chunks of 64 tokens (sm_90a). Before these kernels run
// delta_rule_prepare, and delta_rule_scan with `keeps`, which leaves the state before each chunk,
// S0, and delta, D. With the names of chunk_prepare.cu, R for `read` and I for `inverse`:
//
//   walk    from the last chunk to the first, with the gradient dS of the state in registers as the
//           forward walk has the state (chunk_scan.cu), and d_out in the place of v:
//             dD = Rᵀ dO + w (k dSᵀ)     Y = Iᵀ dD     dv = beta Y
//             dS = exp(G_last) dS + (r dO)ᵀ q - (h Y)ᵀ k
//           with the factors w = write, r = read and h = held of each token. It keeps dS behind
//           each chunk, and Y.
//   tokens  a CTA for each chunk and value head, with mma.sync; unit keys and queries k̂, q̂:
//             X = dO Dᵀ ⊙ decay          N = -strictly lower (Y Dᵀ)       P = beta N ⊙ decay
//             dq̂ = exp(G) dO S0 + X k̂
//             dk̂ = Xᵀ q̂ + P k̂ + Pᵀ k̂ + exp(G_last - G) D dS - beta exp(G) Y S0
//             dbeta = rows of Y ⊙ (v - exp(G) k̂ S0ᵀ) + N ⊙ (k̂ k̂ᵀ) ⊙ decay
//             dG = (rows - columns) of X ⊙ (q̂ k̂ᵀ) + N ⊙ M, and what exp(G) and exp(G_last - G) add;
//             dg is its sum from the chunk's end
//
// dq̂, dk̂, dg and dbeta go to the sums that recurrent_backward.cu adds up over value heads and leads
// through norms and gates. Sources: the algebra of chunks, Yang et al. 2024 (arXiv 2412.06464).
#include "gated_delta_rule/chunk_walk.cuh"

namespace fftune {

template <delta_rule_form form, delta_scan_config c>
struct delta_walk_back : delta_warpgroup<form, c> {
  using Warpgroup = delta_warpgroup<form, c>;
  using Scan = typename Warpgroup::Scan;
  using T = typename Scan::T;
  using Warpgroup::convert, Warpgroup::issue_chunk_product, Warpgroup::issue_state_product;
  using Warpgroup::issue_write, Warpgroup::lane, Warpgroup::own_column, Warpgroup::operand;
  using Warpgroup::state, Warpgroup::warpgroup, Warpgroup::for_each_element;
  static constexpr int features = form.dim;

  float sum[delta_chunk / 2];  // k dSᵀ, then dD, then Y, transposed

  __device__ __forceinline__ void run(const delta_chunk_backward_params& p,
                                      const delta_scan_work<form, c>& work,
                                      typename Scan::stages pipe, u32 base) {
    const delta_rule_params& f = p.chunk.layer;
    const i64 place =
        (static_cast<i64>(work.index) * f.v_heads + work.head) * form.dim * form.v_dim;
    const u32 dv_buffer = base + Scan::out_at + warpgroup() * Scan::slab_bytes;
    const u32 kept = base + Scan::kept_at + warpgroup() * Scan::kept_bytes;  // Y, dS
    for_each_element(work.first_v, [&](int v, int k, float& value) {
      value = p.back.d_final_state == nullptr
                  ? 0.0f
                  : p.back.d_final_state[place + Warpgroup::state_at(v, k)];
    });
    convert(state, operand);
    u32 words[4][4], dv_words[4][4];  // Y and dv of the chunk behind
    for (int chunk = work.end - 1; chunk >= work.begin; --chunk, pipe.advance()) {
      const int tokens = work.tokens(chunk);
      const u32 stage = pipe.buffer(), factors = stage + Scan::factors_at;
      pipe.wait_full();
      if (tokens < delta_chunk) {
        Warpgroup::clear_rows(stage + Scan::k_at, tokens);
        Warpgroup::clear_rows(stage + Scan::q_at, tokens);
      }
      wgmma_fence();
      issue_state_product(sum, stage + Scan::k_at);
      const bool is_first = chunk + 1 == work.end;
      keep(p, work, chunk, kept, is_first, words);
      if (!is_first)
        Warpgroup::store_rows(f, p.back.dv, work, dv_buffer, dv_words,
                              work.row + (chunk + 1) * delta_chunk, work.tokens(chunk + 1));
      // dO as A: matrices of 8 tokens and 8 rows of v, transposed.
      u32 values[4][4], rest[4][4];
#pragma unroll
      for (int step = 0; step < delta_chunk / 16; ++step) {
        const int token = 16 * step + lane() / 16 * 8 + lane() % 8;
        const int column = static_cast<int>(threadIdx.x) % 128 / 32 * 2 + lane() / 8 % 2;
        load_matrices_transposed(values[step][0], values[step][1], values[step][2], values[step][3],
                                 stage + Scan::v_at + warpgroup() * Scan::slab_bytes + token * 128 +
                                     ((column ^ token % 8) * 16));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int first = 16 * step + i / 2 * 8 + own_column();
          if (first >= tokens) values[step][i] = 0;
          if (first + 1 >= tokens) values[step][i] &= 0xffffu;
        }
      }
      wgmma_wait<0>();
      multiply(sum, factors, delta_factor::write);
      wgmma_fence();
      Warpgroup::template issue_chunk_product<true>(sum, values, stage + Scan::read_at, true);
      wgmma_wait<0>();
      convert(sum, rest);
      wgmma_fence();
      Warpgroup::template issue_chunk_product<true>(sum, rest, stage + Scan::inverse_at, false);
      const float last = load_shared_float(factors + factor_at(delta_factor::last) * 4);
      wgmma_wait<0>();
#pragma unroll
      for (int j = 0; j < features / 2; ++j) state[j] *= last;
      convert(sum, words);
#pragma unroll
      for (int n = 0; n < delta_chunk / 8; ++n) {
        const int at = 8 * n + own_column();
        const float2 beta = load_shared_pair(factors + (factor_at(delta_factor::beta) + at) * 4);
        const float2 held = load_shared_pair(factors + (factor_at(delta_factor::held) + at) * 4);
        const float2 read = load_shared_pair(factors + (factor_at(delta_factor::read) + at) * 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = n % 2 * 2 + half;
          const float first = sum[4 * n + 2 * half], second = sum[4 * n + 2 * half + 1];
          dv_words[n / 2][i] = pack<T>(beta.x * first, beta.y * second);
          rest[n / 2][i] = pack<T>(-held.x * first, -held.y * second);
          float a, b;
          unpack<T>(values[n / 2][i], a, b);
          values[n / 2][i] = pack<T>(read.x * a, read.y * b);
        }
      }
      wgmma_fence();
      issue_write(values, stage + Scan::q_at);
      issue_write(rest, stage + Scan::k_at);
      wgmma_commit();
      wgmma_wait<0>();
      convert(state, operand);
      __syncwarp();
      if (lane() == 0) barrier_arrive(pipe.empty_barrier());
    }
    if (work.begin < work.end) {
      keep(p, work, work.begin - 1, kept, false, words);
      Warpgroup::store_rows(f, p.back.dv, work, dv_buffer, dv_words,
                            work.row + work.begin * delta_chunk, work.tokens(work.begin));
      if (Warpgroup::is_first()) tma_store_wait<0>();
    }
    if (p.back.d_initial_state == nullptr) return;
    for_each_element(work.first_v, [&](int v, int k, float& value) {
      p.back.d_initial_state[place + Warpgroup::state_at(v, k)] = value;
    });
  }

 private:
  static __device__ __forceinline__ void multiply(float (&values)[delta_chunk / 2], u32 factors,
                                                  delta_factor by) {
#pragma unroll
    for (int n = 0; n < delta_chunk / 8; ++n) {
      const float2 factor = load_shared_pair(factors + (factor_at(by) + 8 * n + own_column()) * 4);
      values[4 * n] *= factor.x;
      values[4 * n + 1] *= factor.y;
      values[4 * n + 2] *= factor.x;
      values[4 * n + 3] *= factor.y;
    }
  }

  // Stores dS behind a chunk, and Y of the chunk behind it. Before the first chunk there is no dS
  // to keep.
  __device__ __forceinline__ void keep(const delta_chunk_backward_params& p,
                                       const delta_scan_work<form, c>& work, int chunk, u32 buffer,
                                       bool is_first, const u32 (&words)[4][4]) {
    const bool has_state = chunk >= work.begin;
    const delta_rule_params& f = p.chunk.layer;
    if (Warpgroup::is_first()) tma_store_wait_read<0>();
    Warpgroup::sync();
    if (has_state) Warpgroup::store_operand(buffer + Scan::slab_bytes);
    if (!is_first) Warpgroup::store_transposed(buffer, words);
    async_proxy_fence();
    Warpgroup::sync();
    if (!Warpgroup::is_first()) return;
    if (has_state)
      bulk_store(Warpgroup::tile_of(p.d_states, f, work, chunk, form.dim),
                 buffer + Scan::slab_bytes, Scan::slabs * Scan::slab_bytes);
    if (!is_first)
      bulk_store(Warpgroup::tile_of(p.errors, f, work, chunk + 1, 64), buffer, Scan::slab_bytes);
    tma_store_commit();
  }
};

template <delta_rule_form form, delta_scan_config c>
__global__ void __launch_bounds__(128 * (c.warpgroups + 1), 1)
    delta_rule_walk_back(const __grid_constant__ delta_chunk_backward_params p) {
  using Scan = delta_scan<form, c>;
  extern __shared__ __align__(1024) char memory[];
  const u32 base = shared_address(memory);
  const auto pipe = start_stages<form, c>(base);
  wait_and_launch_dependents();
  const delta_scan_work<form, c> work(p.chunk.layer);
  if (produce_chunks<form, c>(p.chunk, work, pipe)) return;
  delta_walk_back<form, c> walk;
  walk.run(p, work, pipe, base);
}

// --- The gradients of a chunk's tokens ---

constexpr int tokens_threads = 256;

template <delta_rule_form form>
struct delta_tokens {
  using T = element_type<form.type>;
  static constexpr int k_slabs = form.dim / 64, v_slabs = form.v_dim / 64;
  static constexpr int slab_bytes = delta_chunk * 128;

  // Tiles of 64 rows and 64 columns under the 128-byte swizzle.
  struct alignas(1024) memory {
    char s0[v_slabs][k_slabs * slab_bytes],
        d_s[v_slabs][k_slabs * slab_bytes];  // 64 rows of v each
    char d[v_slabs * slab_bytes], y[v_slabs * slab_bytes], d_out[v_slabs * slab_bytes];
    char q[k_slabs * slab_bytes], k[k_slabs * slab_bytes];
    char x_k[slab_bytes], x_q[slab_bytes], p_k[slab_bytes], p_i[slab_bytes];
    float factors[delta_chunk_factors];
    float rows[2][delta_chunk], columns[4][delta_chunk];  // of dG; halves of columns, 16 rows each
    float beta[2][delta_chunk];
    float of_q[2][delta_chunk], of_k[2][delta_chunk], of_write[2][delta_chunk];
    float of_v[delta_chunk];
    float of_last[tokens_threads / 32];
  };

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ __forceinline__ int m_tile() { return static_cast<int>(threadIdx.x) / 32 % 4; }
  static __device__ __forceinline__ int half() { return static_cast<int>(threadIdx.x) / 128; }

  static __device__ __forceinline__ u32 at(int row, int chunk) {
    return chunk / 8 * slab_bytes + row * 128 + ((chunk % 8 ^ row % 8) * 16);
  }
  static __device__ __forceinline__ void load_tile(char* to, const T* from, i64 row, int columns,
                                                   int tokens) {
    for (int i = static_cast<int>(threadIdx.x); i < delta_chunk * columns / 8;
         i += tokens_threads) {
      const int token = i / (columns / 8), chunk = i % (columns / 8);
      const bool is_there = token < tokens;
      copy_async(shared_address(to) + at(token, chunk),
                 from + (is_there ? token * row : 0) + chunk * 8, is_there);
    }
  }
  static __device__ __forceinline__ void load_image(void* to, const void* from, int bytes) {
    for (int i = static_cast<int>(threadIdx.x) * 16; i < bytes; i += tokens_threads * 16)
      copy_async(shared_address(to) + i, static_cast<const char*>(from) + i, true);
  }

  // A of 16 rows: of the tile's rows, or with `transposed` of its columns.
  template <bool transposed>
  static __device__ __forceinline__ void load_a(u32 (&a)[4], const char* tile, int step) {
    const u32 base = shared_address(tile);
    if constexpr (transposed) {
      // Matrices [k, rows]: k, rows; k, rows + 8; k + 8, rows; k + 8, rows + 8.
      load_matrices_transposed(
          a[0], a[1], a[2], a[3],
          base + at(16 * step + lane() / 16 * 8 + lane() % 8, 2 * m_tile() + lane() / 8 % 2));
    } else {
      load_matrices(a[0], a[1], a[2], a[3],
                    base + at(16 * m_tile() + lane() % 16, 2 * step + lane() / 16));
    }
  }

  // sum += a b of 16 columns of b, rows of a K-major tile: a bᵀ.
  static __device__ __forceinline__ void add_rows(float (&first)[4], float (&second)[4],
                                                  const u32 (&a)[4], const char* b, int column,
                                                  int step) {
    u32 words[4];
    load_matrices(
        words[0], words[1], words[2], words[3],
        shared_address(b) + at(column + lane() % 8 + lane() / 16 * 8, 2 * step + lane() / 8 % 2));
    mma_16x8x16<T>(first, a, {words[0], words[1]});
    mma_16x8x16<T>(second, a, {words[2], words[3]});
  }
  // sum += a b of 16 columns of a tile [k, columns].
  static __device__ __forceinline__ void add_columns(float (&first)[4], float (&second)[4],
                                                     const u32 (&a)[4], const char* b, int column,
                                                     int step) {
    u32 words[4];
    load_matrices_transposed(
        words[0], words[1], words[2], words[3],
        shared_address(b) + at(16 * step + lane() % 16, column / 8 + lane() / 16));
    mma_16x8x16<T>(first, a, {words[0], words[1]});
    mma_16x8x16<T>(second, a, {words[2], words[3]});
  }

  // 16 tokens times 16 columns of tokens, of both halves: sum += a bᵀ over `steps` steps.
  static __device__ __forceinline__ void products(float (&sum)[4][4], const char* a, const char* b,
                                                  int steps) {
#pragma unroll 4
    for (int step = 0; step < steps; ++step) {
      u32 rows[4];
      load_a<false>(rows, a, step);
#pragma unroll
      for (int n = 0; n < 2; ++n)
        add_rows(sum[2 * n], sum[2 * n + 1], rows, b, 32 * half() + 16 * n, step);
    }
  }

  static constexpr int own_columns = form.dim / 2;  // features of a warp
  static constexpr int n_tiles = own_columns / 8;

  // sum += tile times a state's tiles, over the rows of v.
  static __device__ __forceinline__ void state_products(float (&sum)[n_tiles][4], const char* tile,
                                                        const char (*state)[k_slabs * slab_bytes]) {
#pragma unroll
    for (int slab = 0; slab < v_slabs; ++slab) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        u32 rows[4];
        load_a<false>(rows, tile + slab * slab_bytes, step);
#pragma unroll
        for (int n = 0; n < n_tiles / 2; ++n)
          add_columns(sum[2 * n], sum[2 * n + 1], rows, state[slab], own_columns * half() + 16 * n,
                      step);
      }
    }
  }
  // sum += matrix times a tile of tokens.
  template <bool transposed>
  static __device__ __forceinline__ void token_products(float (&sum)[n_tiles][4],
                                                        const char* matrix, const char* tile) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      u32 rows[4];
      load_a<transposed>(rows, matrix, step);
#pragma unroll
      for (int n = 0; n < n_tiles / 2; ++n)
        add_columns(sum[2 * n], sum[2 * n + 1], rows, tile, own_columns * half() + 16 * n, step);
    }
  }

  // The sum of a token's elements times those of its row of a tile, over the warp's features; of
  // the thread's two tokens.
  static __device__ __forceinline__ void dot_rows(float (&dot)[2], const float (&sum)[n_tiles][4],
                                                  const char* tile) {
    dot[0] = dot[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
      for (int other = 0; other < 2; ++other) {
        const int row = 16 * m_tile() + lane() / 4 + 8 * other;
        const int column = own_columns * half() + 8 * n + 2 * (lane() % 4);
        float a, b;
        unpack<T>(*reinterpret_cast<const u32*>(tile + at(row, column / 8) + column % 8 * 2), a, b);
        dot[other] += sum[n][2 * other] * a + sum[n][2 * other + 1] * b;
      }
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      dot[0] += __shfl_xor_sync(~0u, dot[0], distance);
      dot[1] += __shfl_xor_sync(~0u, dot[1], distance);
    }
  }
  static __device__ __forceinline__ void write_pair(char* tile, int i, int j, float first,
                                                    float second) {
    *reinterpret_cast<u32*>(tile + at(i, j / 8) + j % 8 * 2) = pack<T>(first, second);
  }

  // --- The kernel of a chunk and value head ---

  struct place_of_cta {
    int slot, head;
    delta_chunk_place place;

    __device__ __forceinline__ place_of_cta(const delta_rule_params& f)
        : slot(static_cast<int>(blockIdx.x) / f.v_heads),
          head(static_cast<int>(blockIdx.x) % f.v_heads),
          place(chunk_of_slot(f, slot)) {}
  };
  static constexpr int state_bytes = form.v_dim * form.dim * 2, delta_bytes = form.v_dim * 128;

  static __device__ __forceinline__ float factor(const memory& shared, delta_factor which,
                                                 int token) {
    return shared.factors[factor_at(which) + token];
  }

  // Two groups of copies: what a pair of tokens needs, then the states.
  static __device__ __forceinline__ void load(memory& shared, const delta_chunk_backward_params& p,
                                              const place_of_cta& cta) {
    const delta_rule_params& f = p.chunk.layer;
    const int k_column = cta.head / (f.v_heads / f.heads) * form.dim;
    const i64 of_head = static_cast<i64>(cta.slot) * f.v_heads + cta.head;
    const i64 v_at = (cta.place.row * f.v_heads + cta.head) * form.v_dim;
    const i64 v_row = static_cast<i64>(f.v_heads) * form.v_dim;
    load_image(shared.factors, p.chunk.factors + of_head * delta_chunk_factors,
               delta_chunk_factors * 4);
    const auto image = [&](const void* tiles, int size) {
      return static_cast<const char*>(tiles) + of_head * size;
    };
    load_image(shared.d, image(p.chunk.deltas, delta_bytes), delta_bytes);
    load_image(shared.y, image(p.errors, delta_bytes), delta_bytes);
    load_tile(shared.d_out, static_cast<const T*>(p.back.d_out) + v_at, v_row, form.v_dim,
              cta.place.tokens);
    load_tile(shared.q, static_cast<const T*>(f.q) + cta.place.row * f.q_row + k_column, f.q_row,
              form.dim, cta.place.tokens);
    load_tile(shared.k, static_cast<const T*>(f.k) + cta.place.row * f.k_row + k_column, f.k_row,
              form.dim, cta.place.tokens);
    copy_async_commit();
    load_image(shared.s0, image(p.chunk.states, state_bytes), state_bytes);
    load_image(shared.d_s, image(p.d_states, state_bytes), state_bytes);
    copy_async_commit();
  }

  // The matrices of pairs of tokens, and their sums over rows and columns.
  static __device__ __forceinline__ void multiply_pairs(memory& shared) {
    float dod[4][4] = {}, yd[4][4] = {}, qk[4][4] = {}, kk[4][4] = {};
    products(dod, shared.d_out, shared.d, 4 * v_slabs);
    products(yd, shared.y, shared.d, 4 * v_slabs);
    products(qk, shared.q, shared.k, 4 * k_slabs);
    products(kk, shared.k, shared.k, 4 * k_slabs);
    float rows[2] = {}, of_beta[2] = {}, columns[4][2] = {};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int other = 0; other < 2; ++other) {
        const int i = 16 * m_tile() + lane() / 4 + 8 * other;
        const int first_j = 32 * half() + 8 * n + 2 * (lane() % 4);
        float x_k[2], x_q[2], p_k[2], p_i[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = first_j + e, at = 2 * other + e;
          const float difference =
              factor(shared, delta_factor::sum, i) - factor(shared, delta_factor::sum, j);
          const float decay = approximate_exp2(i >= j ? difference : -1e30f);
          const float norm_i = factor(shared, delta_factor::k_norm, i);
          const float norm_j = factor(shared, delta_factor::k_norm, j);
          const float norm_q = factor(shared, delta_factor::q_norm, i);
          const float x = i >= j ? dod[n][at] * decay : 0.0f;
          const float slope = i > j ? -yd[n][at] * decay : 0.0f;  // N, decayed
          const float beta = factor(shared, delta_factor::beta, i);
          const float keys = i > j ? norm_i * norm_j * kk[n][at] : 0.0f;
          const float queries = i >= j ? norm_q * norm_j * qk[n][at] : 0.0f;
          x_k[e] = x * norm_j;
          x_q[e] = x * norm_q;
          p_k[e] = beta * slope * norm_j;
          p_i[e] = beta * slope * norm_i;
          const float both = x * queries + beta * slope * keys;
          rows[other] += both;
          columns[n][e] += both;
          of_beta[other] += slope * keys;
        }
        write_pair(shared.x_k, i, first_j, x_k[0], x_k[1]);
        write_pair(shared.x_q, i, first_j, x_q[0], x_q[1]);
        write_pair(shared.p_k, i, first_j, p_k[0], p_k[1]);
        write_pair(shared.p_i, i, first_j, p_i[0], p_i[1]);
      }
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
      for (int other = 0; other < 2; ++other) {
        rows[other] += __shfl_xor_sync(~0u, rows[other], distance);
        of_beta[other] += __shfl_xor_sync(~0u, of_beta[other], distance);
      }
    }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        columns[i / 2][i % 2] += __shfl_xor_sync(~0u, columns[i / 2][i % 2], distance);
    }
    if (lane() % 4 == 0) {
#pragma unroll
      for (int other = 0; other < 2; ++other) {
        const int i = 16 * m_tile() + lane() / 4 + 8 * other;
        shared.rows[half()][i] = rows[other];
        shared.beta[half()][i] = of_beta[other];
      }
    }
    if (lane() < 4) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        shared.columns[m_tile()][32 * half() + 8 * (i / 2) + 2 * lane() + i % 2] =
            columns[i / 2][i % 2];
    }
  }

  // Y v of each token: four threads have a row.
  static __device__ __forceinline__ void dot_values(memory& shared, const delta_rule_params& f,
                                                    const place_of_cta& cta) {
    const int thread = static_cast<int>(threadIdx.x);
    const int token = thread / 4;
    float sum = 0.0f;
    if (token < cta.place.tokens) {
      const T* const v = static_cast<const T*>(f.v) + (cta.place.row + token) * f.v_row +
                         static_cast<i64>(cta.head) * form.v_dim;
      for (int i = thread % 4; i < form.v_dim / 8; i += 4) {
        const vector16 given = load_dependent(v + i * 8);
        const uint4 own = *reinterpret_cast<const uint4*>(shared.y + at(token, i));
        const u32 words[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          float a, b, first, second;
          unpack<T>(given.word[w], a, b);
          unpack<T>(words[w], first, second);
          sum += a * first + b * second;
        }
      }
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (thread % 4 == 0) shared.of_v[token] = sum;
  }

  // <dS, S0>, which the decay of the whole chunk multiplies.
  static __device__ __forceinline__ void dot_states(memory& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    float sum = 0.0f;
    for (int i = thread; i < state_bytes / 16; i += tokens_threads) {
      const uint4 a = reinterpret_cast<const uint4*>(shared.s0)[i];
      const uint4 b = reinterpret_cast<const uint4*>(shared.d_s)[i];
      const u32 first[4] = {a.x, a.y, a.z, a.w}, second[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float a0, a1, b0, b1;
        unpack<T>(first[w], a0, a1);
        unpack<T>(second[w], b0, b1);
        sum += a0 * b0 + a1 * b1;
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane() == 0) shared.of_last[thread / 32] = sum;
  }

  // A thread's token, by the rows of its accumulators.
  static __device__ __forceinline__ int token_of(int other) {
    return 16 * m_tile() + lane() / 4 + 8 * other;
  }
  static __device__ __forceinline__ void scale(float (&sum)[n_tiles][4], float first,
                                               float second) {
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
      sum[n][0] *= first;
      sum[n][1] *= first;
      sum[n][2] *= second;
      sum[n][3] *= second;
    }
  }
  static __device__ __forceinline__ void store(const delta_chunk_backward_params& p,
                                               const place_of_cta& cta,
                                               const float (&sum)[n_tiles][4], int part, float by) {
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
      for (int other = 0; other < 2; ++other) {
        const int token = token_of(other);
        if (token >= cta.place.tokens) continue;
        float* const to =
            p.back.row_sums +
            (((cta.place.row + token) * p.chunk.layer.v_heads + cta.head) * 2 + part) * form.dim +
            own_columns * half() + 8 * n + 2 * (lane() % 4);
        *reinterpret_cast<float2*>(to) = {by * sum[n][2 * other], by * sum[n][2 * other + 1]};
      }
    }
  }
  static __device__ __forceinline__ void keep(float (*to)[delta_chunk], const float (&dot)[2]) {
    if (lane() % 4 == 0) {
      to[half()][token_of(0)] = dot[0];
      to[half()][token_of(1)] = dot[1];
    }
  }

  static __device__ __forceinline__ void find_dq(memory& shared,
                                                 const delta_chunk_backward_params& p,
                                                 const place_of_cta& cta) {
    float dot[2];
    float dq[n_tiles][4] = {};
    state_products(dq, shared.d_out, shared.s0);
    dot_rows(dot, dq, shared.q);
    keep(shared.of_q, dot);
    scale(dq, approximate_exp2(factor(shared, delta_factor::sum, token_of(0))),
          approximate_exp2(factor(shared, delta_factor::sum, token_of(1))));
    token_products<false>(dq, shared.x_k, shared.k);
    store(p, cta, dq, 0, p.chunk.layer.scale);
  }
  static __device__ __forceinline__ void find_dk(memory& shared,
                                                 const delta_chunk_backward_params& p,
                                                 const place_of_cta& cta) {
    float dot[2];
    float dk[n_tiles][4] = {}, more[n_tiles][4] = {};
    state_products(dk, shared.y, shared.s0);
    dot_rows(dot, dk, shared.k);
    keep(shared.of_k, dot);
    const auto held = [&](int i) {
      return -factor(shared, delta_factor::beta, i) *
             approximate_exp2(factor(shared, delta_factor::sum, i));
    };
    scale(dk, held(token_of(0)), held(token_of(1)));
    state_products(more, shared.d, shared.d_s);
    dot_rows(dot, more, shared.k);
    keep(shared.of_write, dot);
    const float end = factor(shared, delta_factor::sum, delta_chunk - 1);
    scale(more, approximate_exp2(end - factor(shared, delta_factor::sum, token_of(0))),
          approximate_exp2(end - factor(shared, delta_factor::sum, token_of(1))));
    token_products<false>(dk, shared.p_k, shared.k);
    token_products<true>(dk, shared.x_q, shared.q);
    token_products<true>(more, shared.p_i, shared.k);
#pragma unroll
    for (int i = 0; i < n_tiles * 4; ++i) dk[i / 4][i % 4] += more[i / 4][i % 4];
    store(p, cta, dk, 1, 1.0f);
  }

  // The gradients of the gates, by one warp: two tokens in each lane, in the order of the sum from
  // the end.
  static __device__ __forceinline__ void find_gates(const memory& shared,
                                                    const delta_chunk_backward_params& p,
                                                    const place_of_cta& cta) {
    const delta_rule_params& f = p.chunk.layer;
    float d_sums[2], of_write[2], of_beta[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * lane() + e;
      const float decayed = approximate_exp2(factor(shared, delta_factor::sum, i));
      const float held = decayed * factor(shared, delta_factor::k_norm, i) *
                         (shared.of_k[0][i] + shared.of_k[1][i]);
      of_write[e] =
          factor(shared, delta_factor::write, i) * (shared.of_write[0][i] + shared.of_write[1][i]);
      float columns = 0.0f;
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) columns += shared.columns[tile][i];
      d_sums[e] = shared.rows[0][i] + shared.rows[1][i] - columns +
                  factor(shared, delta_factor::read, i) * (shared.of_q[0][i] + shared.of_q[1][i]) -
                  factor(shared, delta_factor::beta, i) * held - of_write[e];
      of_beta[e] = shared.of_v[i] - held + shared.beta[0][i] + shared.beta[1][i];
    }
    float all = of_write[0] + of_write[1];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) all += __shfl_xor_sync(~0u, all, distance);
    if (lane() == 31) {
      float last = 0.0f;
#pragma unroll
      for (int w = 0; w < tokens_threads / 32; ++w) last += shared.of_last[w];
      d_sums[1] += all + factor(shared, delta_factor::last, 0) * last;
    }
    d_sums[0] += d_sums[1];
    float behind = d_sums[0];  // of this lane's tokens and all behind them
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_down_sync(~0u, behind, distance);
      if (lane() + distance < 32) behind += other;
    }
    const float later = behind - d_sums[0];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * lane() + e;
      if (i >= cta.place.tokens) continue;
      float* const to = p.back.gate_sums + ((cta.place.row + i) * f.v_heads + cta.head) * 2;
      to[0] = of_beta[e];
      to[1] = d_sums[e] + later;
    }
  }
};

// Grid: chunk slots * v_heads.
template <delta_rule_form form>
__global__ void __launch_bounds__(tokens_threads, 1)
    delta_rule_tokens(const __grid_constant__ delta_chunk_backward_params p) {
  using Tokens = delta_tokens<form>;
  extern __shared__ __align__(1024) char bytes[];
  auto& shared = *reinterpret_cast<typename Tokens::memory*>(bytes);
  wait_and_launch_dependents();
  const typename Tokens::place_of_cta cta(p.chunk.layer);
  if (cta.place.tokens <= 0) return;
  Tokens::load(shared, p, cta);
  copy_async_wait<1>();
  __syncthreads();
  Tokens::multiply_pairs(shared);
  Tokens::dot_values(shared, p.chunk.layer, cta);
  copy_async_wait<0>();
  __syncthreads();
  Tokens::dot_states(shared);
  Tokens::find_dq(shared, p, cta);
  Tokens::find_dk(shared, p, cta);
  __syncthreads();
  if (threadIdx.x < 32) Tokens::find_gates(shared, p, cta);
}

}  // namespace fftune
