// The matrices of all chunks of 64 tokens of gated-delta-rule, which do not depend on the state
// (chunk_params.cuh). Each value head has one decay.
//
// With G the running sum of g in a chunk, r_k and r_q the reciprocal norms, and products in bf16
// with sums in fp32, a CTA computes for one head of q, and each of its value heads:
//
//   M [i, j]       = beta_i r_k,i r_k,j (k_i k_j), i > j
//   T              = (I + M)^-1, without the decay
//   inverse [i, j] = T [i, j] exp(G_i - G_j)
//   delta          = inverse (beta (v - exp(G) r_k (k S)))
//   read [i, j]    = scale r_q,i r_k,j (q_i k_j) exp(G_i - G_j), i >= j
//
// The decay of T factors out because exp(G_i - G_j) is a product of numbers of i and of j (the
// inverse of diag(a) (I + M) diag(1/a)), and is multiplied in as a difference, which never
// overflows.
//
//   q, k: cp.async -> shared memory, 128-byte swizzle      4 warps, each with 16 tokens i
//   k kᵀ, q kᵀ: mma.sync -> registers
//   M -> shared memory (fp32)
//   T: 16 x 16 diagonal blocks by forward substitution, a thread for each column; then blocks of 32
//      and of 64 from the halves, -T22 (M21 T11), in tf32
//   inverse, read: images of K-major tiles under the 128-byte swizzle -> 16-byte stores
//
// Tokens behind the sequence's last one have zeros for q, k, beta and g: rows and columns of zeros,
// but for ones on the diagonal of `inverse`.
//
// Grid: chunks * heads.
#include "common/async.cuh"
#include "common/mma.cuh"
#include "gated_delta_rule/chunk_params.cuh"
#include "gated_delta_rule/token.cuh"

namespace fftune {

constexpr int prepare_threads = 128;
constexpr int prepare_row = delta_chunk + 4;  // floats of a row of M and T

// D += A B of one m16n8k8 tile in tf32: A [16, 8] and B [8, 8] by functions (row, column).
template <class A, class B>
__device__ __forceinline__ void add_product_tf32(float (&sum)[4], const A& a, const B& b) {
  const int lane = static_cast<int>(threadIdx.x) % 32, group = lane / 4, pair = lane % 4;
  const auto rounded = [](float value) {
    u32 bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return bits;
  };
  const u32 a0 = rounded(a(group, pair)), a1 = rounded(a(group + 8, pair));
  const u32 a2 = rounded(a(group, pair + 4)), a3 = rounded(a(group + 8, pair + 4));
  const u32 b0 = rounded(b(pair, group)), b1 = rounded(b(pair + 4, group));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <delta_rule_form form>
struct delta_prepare {
  using T = element_type<form.type>;
  static constexpr int slabs = form.dim / 64;  // of 64 features, rows of 128 bytes
  static constexpr int slab_bytes = delta_chunk * 128;

  struct alignas(1024) memory {
    union {
      char q[slabs * slab_bytes];
      char images[2][slab_bytes];  // inverse, read; once nobody needs q
    };
    char k[slabs * slab_bytes];
    float m[delta_chunk][prepare_row], t[delta_chunk][prepare_row];
    float sums[delta_chunk];  // G * log2(e)
    float beta[delta_chunk];
    float k_norm[delta_chunk], q_norm[delta_chunk];  // reciprocals, that of q with the scale
  };

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / 32; }

  // The place of 16 bytes in a tile.
  static __device__ __forceinline__ u32 at(int row, int chunk) {
    return chunk / 8 * slab_bytes + row * 128 + ((chunk % 8 ^ row % 8) * 16);
  }

  static __device__ __forceinline__ void load_tile(char* to, const T* from, i64 row, int tokens) {
    for (int i = static_cast<int>(threadIdx.x); i < delta_chunk * form.dim / 8;
         i += prepare_threads) {
      const int token = i / (form.dim / 8), chunk = i % (form.dim / 8);
      const bool is_there = token < tokens;
      copy_async(shared_address(to) + at(token, chunk),
                 from + (is_there ? token * row : 0) + chunk * 8, is_there);
    }
  }

  // The reciprocal norm of a token's row; 1 without a norm.
  static __device__ __forceinline__ float reciprocal_norm(const char* tile, int token) {
    if constexpr (!form.normed) return 1.0f;
    float squares = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < form.dim / 8; ++chunk) {
      const uint4 words = *reinterpret_cast<const uint4*>(tile + at(token, chunk));
#pragma unroll
      for (const u32 word : {words.x, words.y, words.z, words.w}) {
        float first, second;
        unpack<T>(word, first, second);
        squares += first * first + second * second;
      }
    }
    return 1.0f / sqrtf(squares + 1e-6f);
  }

  // Rows 16 warp.. of a kᵀ, of columns that are not all above the diagonal.
  static __device__ __forceinline__ void products(float (&sum)[delta_chunk / 8][4], const char* a,
                                                  const char* k) {
    const u32 of_a = shared_address(a), of_k = shared_address(k);
#pragma unroll
    for (int step = 0; step < form.dim / 16; ++step) {
      u32 rows[4];
      load_matrices(rows[0], rows[1], rows[2], rows[3],
                    of_a + at(16 * warp() + lane() % 16, 2 * step + lane() / 16));
#pragma unroll
      for (int n = 0; n < delta_chunk / 16; ++n) {
        if (n > warp()) break;
        u32 columns[4];
        load_matrices(columns[0], columns[1], columns[2], columns[3],
                      of_k + at(16 * n + lane() % 8 + lane() / 16 * 8, 2 * step + lane() / 8 % 2));
        mma_16x8x16<T>(sum[2 * n], rows, {columns[0], columns[1]});
        mma_16x8x16<T>(sum[2 * n + 1], rows, {columns[2], columns[3]});
      }
    }
  }

  // Calls visit(i, j, values) for each pair of neighbours, j and j + 1, of rows 16 warp... Nothing
  // depends on a branch: the pairs' chains of arithmetic overlap.
  template <class Visit>
  static __device__ __forceinline__ void for_each_pair(const float (&sum)[delta_chunk / 8][4],
                                                       const Visit& visit) {
#pragma unroll
    for (int n = 0; n < delta_chunk / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        visit(16 * warp() + lane() / 4 + 8 * half, 8 * n + 2 * (lane() % 4), sum[n][2 * half],
              sum[n][2 * half + 1]);
    }
  }

  // The log of the decay, and beta, of a token of a value head. Threads below 64 have a token each.
  struct token_gates {
    float g = 0.0f, beta = 0.0f;
  };
  static __device__ __forceinline__ token_gates load_gates(const delta_rule_params& p, i64 row,
                                                           int tokens, int head) {
    using Gates = delta_rule_gates<form>;
    const int token = static_cast<int>(threadIdx.x);
    token_gates own;
    if (token >= tokens || token >= delta_chunk) return own;
    const Gates gates(p, head);
    const i64 at = row + token;
    const int of_head = gate_of_head(p, head);
    const float bias = Gates::given ? 0.0f : p.dt_bias[head];
    own.g = gates.log_decay(
        to_float(static_cast<const typename Gates::Raw*>(p.gate)[at * p.g_row + of_head]), bias);
    own.beta = gates.beta(
        to_float(static_cast<const typename Gates::RawBeta*>(p.beta)[at * p.beta_row + of_head]));
    return own;
  }
  // Their running sums, to shared memory.
  static __device__ __forceinline__ void sum_gates(memory& shared, const token_gates& own) {
    const int token = static_cast<int>(threadIdx.x);
    if (token < delta_chunk) {
      // exp(-200) is 0 in fp32, and sums of smaller numbers would lose those of ordinary gates.
      float sum = (own.g < -200.0f ? -200.0f : own.g) * 1.44269504f;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const float other = __shfl_up_sync(~0u, sum, distance);
        if (lane() >= distance) sum += other;
      }
      shared.sums[token] = sum;
      shared.beta[token] = own.beta;
    }
    __syncthreads();
    if (token >= 32 && token < delta_chunk) shared.sums[token] += shared.sums[31];
    __syncthreads();
  }

  // T = (I + M)^-1, lower triangular.
  static __device__ __forceinline__ void invert(memory& shared) {
    if (threadIdx.x < delta_chunk) {
      const int block = static_cast<int>(threadIdx.x) / 16 * 16;
      const int column = static_cast<int>(threadIdx.x) % 16;
      float x[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float sums[4] = {};
#pragma unroll
        for (int j = 0; j < i; j += 4) {
          const float4 row = *reinterpret_cast<const float4*>(&shared.m[block + i][block + j]);
          sums[0] += row.x * x[j];
          if (j + 1 < i) sums[1] += row.y * x[j + 1];
          if (j + 2 < i) sums[2] += row.z * x[j + 2];
          if (j + 3 < i) sums[3] += row.w * x[j + 3];
        }
        const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        x[i] = i < column ? 0.0f : i == column ? 1.0f : -sum;
        shared.t[block + i][block + column] = x[i];
      }
    }
    __syncthreads();
    // A half's product is kept above the diagonal, where T is not read: it is zero.
    const auto merge = [&](int first, int half, int column, auto m_tiles) {
      constexpr int tiles = decltype(m_tiles)::value;
      const int row = lane() / 4, pair = 2 * (lane() % 4);
      float sum[tiles][4] = {};
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        for (int k = column / 16 * 16; k < 16 * tiles; k += 8)
          add_product_tf32(
              sum[tile],
              [&](int i, int j) { return shared.m[first + half + 16 * tile + i][first + k + j]; },
              [&](int i, int j) { return shared.t[first + k + i][first + column + j]; });
      }
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          shared.t[first + 16 * tile + row + e / 2 * 8][first + half + column + pair + e % 2] =
              sum[tile][e];
      }
      __syncwarp();
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        float product[4] = {};
#pragma unroll
        for (int k = 0; k < 16 * (tile + 1); k += 8)
          add_product_tf32(
              product,
              [&](int i, int j) {
                return shared.t[first + half + 16 * tile + i][first + half + k + j];
              },
              [&](int i, int j) { return shared.t[first + k + i][first + half + column + j]; });
#pragma unroll
        for (int e = 0; e < 4; ++e)
          shared.t[first + half + 16 * tile + row + e / 2 * 8][first + column + pair + e % 2] =
              -product[e];
      }
      __syncthreads();
    };
    merge(warp() / 2 * 32, 16, warp() % 2 * 8, constant<1>());
    merge(0, 32, warp() * 8, constant<2>());
  }

  template <int number>
  struct constant {
    static constexpr int value = number;
  };

  // exp(G_i - G_j) where the pair counts, else 0: selected before the power, which could overflow.
  static __device__ __forceinline__ float decay(bool counts, float sum_i, float sum_j) {
    return approximate_exp2(counts ? sum_i - sum_j : -1e30f);
  }

  static __device__ __forceinline__ void write_m(memory& shared,
                                                 const float (&kk)[delta_chunk / 8][4]) {
    for_each_pair(kk, [&](int i, int j, float first, float second) {
      const float factor = shared.beta[i] * shared.k_norm[i];
      const float2 norm = *reinterpret_cast<const float2*>(&shared.k_norm[j]);
      *reinterpret_cast<float2*>(&shared.m[i][j]) = {i > j ? factor * norm.x * first : 0.0f,
                                                     i > j + 1 ? factor * norm.y * second : 0.0f};
    });
  }
  static __device__ __forceinline__ void write_read(memory& shared,
                                                    const float (&qk)[delta_chunk / 8][4]) {
    for_each_pair(qk, [&](int i, int j, float first, float second) {
      const float factor = shared.q_norm[i], sum = shared.sums[i];
      const float2 norm = *reinterpret_cast<const float2*>(&shared.k_norm[j]);
      const float2 sums = *reinterpret_cast<const float2*>(&shared.sums[j]);
      const float a = factor * norm.x * first * decay(i >= j, sum, sums.x);
      const float b = factor * norm.y * second * decay(i > j, sum, sums.y);
      *reinterpret_cast<u32*>(shared.images[1] + at(i, j / 8) + j % 8 * 2) =
          pack<T>(i >= j ? a : 0.0f, i > j ? b : 0.0f);
    });
  }
  // Half a row for each thread.
  static __device__ __forceinline__ void write_inverse(memory& shared) {
    const int i = static_cast<int>(threadIdx.x) / 2;
    const float sum = shared.sums[i];
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int first = static_cast<int>(threadIdx.x) % 2 * (delta_chunk / 2) + 8 * part;
      float value[8];
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        const float4 t = *reinterpret_cast<const float4*>(&shared.t[i][first + e]);
        const float4 sums = *reinterpret_cast<const float4*>(&shared.sums[first + e]);
        const float own[4] = {t.x, t.y, t.z, t.w}, others[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const bool counts = first + e + c <= i;
          const float product = own[c] * decay(counts, sum, others[c]);
          value[e + c] = counts ? product : 0.0f;
        }
      }
      *reinterpret_cast<uint4*>(shared.images[0] + at(i, first / 8)) = {
          pack<T>(value[0], value[1]), pack<T>(value[2], value[3]), pack<T>(value[4], value[5]),
          pack<T>(value[6], value[7])};
    }
  }
};

template <delta_rule_form form>
__global__ void __launch_bounds__(prepare_threads, 2)
    delta_rule_prepare(const __grid_constant__ delta_chunk_params p) {
  using Prepare = delta_prepare<form>;
  using T = typename Prepare::T;
  extern __shared__ __align__(1024) char bytes[];
  auto& shared = *reinterpret_cast<typename Prepare::memory*>(bytes);
  wait_and_launch_dependents();
  const delta_rule_params& f = p.layer;
  const int slot = static_cast<int>(blockIdx.x) / f.heads;
  const int head = static_cast<int>(blockIdx.x) % f.heads;
  const delta_chunk_place place = chunk_of_slot(f, slot);
  if (place.tokens <= 0) return;
  Prepare::load_tile(shared.q, static_cast<const T*>(f.q) + place.row * f.q_row + head * form.dim,
                     f.q_row, place.tokens);
  Prepare::load_tile(shared.k, static_cast<const T*>(f.k) + place.row * f.k_row + head * form.dim,
                     f.k_row, place.tokens);
  copy_async_commit();
  const int group = f.v_heads / f.heads;
  auto gates = Prepare::load_gates(f, place.row, place.tokens, head * group);
  copy_async_wait<0>();
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < delta_chunk) {
    shared.k_norm[thread] = Prepare::reciprocal_norm(shared.k, thread);
  } else {
    shared.q_norm[thread - delta_chunk] =
        f.scale * Prepare::reciprocal_norm(shared.q, thread - delta_chunk);
  }
  float kk[delta_chunk / 8][4] = {}, qk[delta_chunk / 8][4] = {};
  Prepare::products(kk, shared.k, shared.k);
  Prepare::products(qk, shared.q, shared.k);
  for (int v_head = head * group; v_head < (head + 1) * group; ++v_head) {
    Prepare::sum_gates(shared, gates);
    Prepare::write_m(shared, kk);
    Prepare::write_read(shared, qk);
    __syncthreads();
    Prepare::invert(shared);
    Prepare::write_inverse(shared);
    if (v_head + 1 < (head + 1) * group)
      gates = Prepare::load_gates(f, place.row, place.tokens, v_head + 1);
    const i64 at = static_cast<i64>(slot) * f.v_heads + v_head;
    float* const factors = p.factors + at * delta_chunk_factors;
    if (thread < delta_chunk) {
      const float sum = shared.sums[thread], last = shared.sums[delta_chunk - 1];
      const float decayed = approximate_exp2(sum), k_norm = shared.k_norm[thread];
      const auto set = [&](delta_factor factor, float value) {
        factors[factor_at(factor) + thread] = value;
      };
      set(delta_factor::held, shared.beta[thread] * decayed * k_norm);
      set(delta_factor::read, decayed * shared.q_norm[thread]);
      set(delta_factor::write, approximate_exp2(last - sum) * k_norm);
      set(delta_factor::beta, shared.beta[thread]);
      set(delta_factor::last, approximate_exp2(last));
      set(delta_factor::sum, sum);
      set(delta_factor::k_norm, k_norm);
      set(delta_factor::q_norm, shared.q_norm[thread]);
    }
    __syncthreads();
    uint4* const to = reinterpret_cast<uint4*>(p.images) + at * (2 * Prepare::slab_bytes / 16);
#pragma unroll
    for (int i16 = 0; i16 < 2 * Prepare::slab_bytes / 16 / prepare_threads; ++i16)
      to[i16 * prepare_threads + thread] =
          reinterpret_cast<const uint4*>(shared.images)[i16 * prepare_threads + thread];
    __syncthreads();
  }
}

}  // namespace fftune
