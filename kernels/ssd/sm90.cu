// ssd by chunks of 64 tokens with wgmma and TMA, for bf16 (sm_90a). A CTA walks over the chunks of
// a sequence with up to 128 rows of a head's state. With G the sums of dt A in the chunk, and S the
// state before it:
//
//   out = M x + exp(G) C Sᵀ,   M = C Bᵀ exp(G_i - G_j) dt_j for i >= j
//   Sᵀ  = exp(G_last) Sᵀ + (exp(G_last - G_j) dt_j B_j)ᵀ x_j
//
//   producer warps       shared memory, stages       state warpgroup
//  +----------------+   +-----------------------+   +-----------------------------------------+
//  | TMA: C, B, x   |-->| C, B [64, state-dim]  |-->| Sᵀ += (w B)ᵀ x, in its accumulators     |
//  | a warp: dt to  |-->| x [64, rows]          |   | Sᵀ in bf16 to one of two places    --+  |
//  |   factors      |   | factors               |   +--------------------------------------|--+
//  +----------------+   +-----------------------+   +--------------------------------------v--+
//                                               \-->| two output warpgroups, each with every  |
//                                                   | other chunk: C Bᵀ and C Sᵀ, M, M x, out |
//                                                   +-----------------------------------------+
//
//  barrier             arrivals that complete a phase               who waits
//  full [stage]        TMA with its bytes; the warp of factors      MMA warpgroups
//  empty [stage]       the 4 warps of the state, 4 of the output    producer warps
//                      warpgroup that had it, of all CTAs of the
//                      cluster
//  state_full [2]      the warps of the state warpgroup: Sᵀ is      an output warpgroup
//                      there
//  state_empty [2]     the warps of the output warpgroup            the state warpgroup
//  tail                x of the last chunk, unless it is whole      the warp of factors
//
// The chunks of a head follow each other, because that moves the least: 8,192 tokens of 128 heads
// of 64, states of 128 and 8 groups are 304 MB, 70 us. If all chunks ran side by side, states of
// every 256 tokens would be written, passed on and read, 270 MB more, and x would be read twice:
// 157 us. The chain from chunk to chunk is kept short instead: Sᵀ stays in accumulators, and other
// warpgroups compute out, three quarters of the MMAs. A chunk has 900 cycles of MMAs (C Bᵀ 256, C
// Sᵀ 256, M x 128, Sᵀ 256) and a chain of some 650: 65 us for 128 chunks. Each head loads 32 KB of
// B and C for a chunk, with x 670 MB in all, 120 us from L2. CTAs of a cluster load B and C once.
//
// Sᵀ, not S, is accumulated: its columns are the rows of a head, any multiple of 16, and B is A of
// the product, through registers, where it is scaled; x is read as it is by both products.
//
// TMA reads whole chunks: rows behind the last token are another sequence's. The warp of factors
// replaces x by zeros there, and B is replaced in registers.
//
// Grid: sequences * heads * ceil(dim / rows), the blocks of a head and the heads of a group next to
// each other. Block: 512.
#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/wgmma_widths.cuh"
#include "ssd/recurrent_tile.cuh"
#include "ssd/sm90_config.cuh"

namespace fftune {

template <ssd_form form, ssd_sm90_config c>
struct ssd_sm90_walk {
  using T = element_type<form.type>;
  using State = element_type<form.state>;
  static constexpr ssd_sm90_plan plan = ssd_sm90_plan_of(form.dim, form.state_dim, c);
  static constexpr int chunk_tokens = ssd_sm90_chunk, columns = plan.columns;
  static constexpr int m_blocks = form.state_dim / 64;
  static constexpr int x_slab = chunk_tokens * plan.slab_row;
  static constexpr int state_slab = form.state_dim * plan.slab_row;
  static constexpr int blocks = ceil_div(form.dim, c.rows);
  static constexpr float log2_e = 1.44269504088896340736f;
  // Products of a decay that is 0 stay 0, and sums exact enough.
  static constexpr float least_decay = -158.0f;
  static_assert(form.type == element::bf16 && form.dim % 16 == 0 && form.state_dim % 64 == 0);
  static_assert(plan.stage % 1024 == 0 && plan.state_bytes % 1024 == 0 && columns <= 128);

  using stages = pipeline<c.stages, plan.stage>;

  const ssd_sm90_params& params;
  const delta_rule_params& p;
  u32 base;  // of shared memory
  int head, first_row_of_state;
  i64 first;  // row of the sequence's first token
  int count;  // its tokens
  int chunks;

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / 32 % 4; }
  static __device__ __forceinline__ int group() { return lane() / 4; }
  static __device__ __forceinline__ int pair() { return lane() % 4; }

  __device__ __forceinline__ stages pipe() const {
    const u32 barriers = base + plan.barriers;
    return {base, barriers, barriers + c.stages * 8};
  }
  __device__ __forceinline__ u32 state_full(int place) const {
    return base + plan.barriers + (2 * c.stages + place) * 8;
  }
  __device__ __forceinline__ u32 state_empty(int place) const {
    return base + plan.barriers + (2 * c.stages + 2 + place) * 8;
  }
  __device__ __forceinline__ u32 tail() const {
    return base + plan.barriers + (2 * c.stages + 4) * 8;
  }
  __device__ __forceinline__ u32 state_place(int place) const {
    return base + plan.states + place * plan.state_bytes;
  }
  __device__ __forceinline__ int tokens_of(int chunk) const {
    return smaller(count - chunk * chunk_tokens, chunk_tokens);
  }
  static __device__ __forceinline__ u32 factor_at(ssd_sm90_factor factor, int token) {
    return plan.factors + (static_cast<int>(factor) * chunk_tokens + token) * 4;
  }
  // 16 bytes number `vector` of a row of columns, in slabs of `slab` bytes.
  static __device__ __forceinline__ u32 place_of(int row, int vector, int slab) {
    constexpr int vectors = plan.slab_row / 16;
    const int swizzled = vector % vectors ^ (vectors == 8 ? row % 8 : row / 2 % 4);
    return static_cast<u32>(vector / vectors * slab + row * plan.slab_row + swizzled * 16);
  }

  __device__ __forceinline__ void init_barriers() const {
    const stages pipe = this->pipe();
    for (int stage = 0; stage < c.stages; ++stage) {
      barrier_init(pipe.full + stage * 8, 2);
      barrier_init(pipe.empty + stage * 8, 8 * c.cluster);
    }
    for (int place = 0; place < 2; ++place) {
      barrier_init(state_full(place), 4);
      barrier_init(state_empty(place), 4);
    }
    barrier_init(tail(), 1);
    barrier_init_fence();
  }
  // A warp has read a stage.
  static __device__ __forceinline__ void release(u32 empty_barrier) {
    __syncwarp();
    if constexpr (c.cluster > 1) {
      if (lane() < c.cluster) barrier_arrive_remote(empty_barrier, static_cast<u32>(lane()));
    } else {
      if (lane() == 0) barrier_arrive(empty_barrier);
    }
  }
  static __device__ __forceinline__ void arrive(u32 barrier) {
    __syncwarp();
    if (lane() == 0) barrier_arrive(barrier);
  }

  // --- Producer warps ---

  // One thread.
  __device__ __forceinline__ void load() const {
    constexpr int matrix_bytes = 2 * plan.feature_slabs * chunk_tokens * 128;
    const int rank = c.cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int feature = head / (p.v_heads / p.heads) * form.state_dim;
    stages to = pipe();
    for (int chunk = 0; chunk < chunks; ++chunk, to.advance()) {
      to.wait_empty();
      const u32 full = to.full_barrier(), stage = to.buffer();
      const int row = static_cast<int>(first) + chunk * chunk_tokens;
      const bool is_whole = tokens_of(chunk) == chunk_tokens;
      const u32 x_barrier = is_whole ? full : tail();
      barrier_arrive_expect(full, matrix_bytes + (is_whole ? plan.x_bytes : 0));
      if (!is_whole) barrier_arrive_expect(tail(), plan.x_bytes);
#pragma unroll
      for (int slab = 0; slab < plan.slabs; ++slab)
        tma_load(stage + plan.x_tile + slab * x_slab, params.x, x_barrier,
                 head * form.dim + first_row_of_state + slab * (plan.slab_row / 2), row,
                 l2_policy::evict_first);
        // B, then C, a share of them for all CTAs of the cluster.
#pragma unroll 1
      for (int i = 0; i < 2 * plan.feature_slabs / c.cluster; ++i) {
        const int n = i * c.cluster + rank, slab = n % plan.feature_slabs;
        const bool is_c = n >= plan.feature_slabs;
        const u32 at = stage + (is_c ? plan.c_tile : plan.b_tile) + slab * chunk_tokens * 128;
        const tensor_map& map = is_c ? params.C : params.B;
        if constexpr (c.cluster > 1) {
          tma_load_multicast(at, map, full, feature + slab * 64, row,
                             static_cast<u16>((1 << c.cluster) - 1), l2_policy::evict_last);
        } else {
          tma_load(at, map, full, feature + slab * 64, row, l2_policy::evict_last);
        }
      }
    }
  }

  // The steps of a lane's two tokens, as they are in memory; 0 behind the last one.
  __device__ __forceinline__ void load_steps(int chunk, float (&input)[2]) const {
    const T* const dt = static_cast<const T*>(p.gate) + head;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = chunk * chunk_tokens + 2 * lane() + i;
      input[i] = token < count ? to_float(dt[(first + token) * p.g_row]) : 0.0f;
    }
  }

  // One warp.
  __device__ __forceinline__ void find_factors() const {
    using factor = ssd_sm90_factor;
    const ssd_head<form> parameters(params.ssd, p, head);
    float input[2];
    load_steps(0, input);
    stages to = pipe();
    for (int chunk = 0; chunk < chunks; ++chunk, to.advance()) {
      const int tokens = tokens_of(chunk), own = 2 * lane();
      float dt[2], sum[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool is_there = own + i < tokens;
        dt[i] = is_there ? parameters.step(input[i]).dt : 0.0f;
        sum[i] = is_there ? dt[i] * parameters.A * log2_e : 0.0f;
        // A NaN stays.
        if (sum[i] < least_decay) sum[i] = least_decay;
      }
      if (chunk + 1 < chunks) load_steps(chunk + 1, input);
      sum[1] += sum[0];
      float before = sum[1];
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const float other = __shfl_up_sync(~0u, before, distance);
        if (lane() >= distance) before += other;
      }
      const float last = __shfl_sync(~0u, before, 31);
      before = __shfl_up_sync(~0u, before, 1);
      if (lane() == 0) before = 0.0f;
      sum[0] += before;
      sum[1] += before;
      to.wait_empty();
      const u32 at = to.buffer();
      store_shared(at + factor_at(factor::sum, own), float2{sum[0], sum[1]});
      store_shared(at + factor_at(factor::before, own),
                   float2{sum[0] - log2f(dt[0]), sum[1] - log2f(dt[1])});
      store_shared(at + factor_at(factor::decay, own),
                   float2{approximate_exp2(sum[0]), approximate_exp2(sum[1])});
      store_shared(
          at + factor_at(factor::write, own),
          float2{approximate_exp2(last - sum[0]) * dt[0], approximate_exp2(last - sum[1]) * dt[1]});
      if (tokens < chunk_tokens) {
        barrier_wait(tail(), 0);
        constexpr int vectors = plan.slab_row / 16;
        const int rest = (chunk_tokens - tokens) * vectors;
        for (int i = lane(); i < plan.slabs * rest; i += 32)
          store_shared(
              at + plan.x_tile + i / rest * x_slab + tokens * plan.slab_row + i % rest * 16,
              float4{});
        async_proxy_fence();
      }
      arrive(to.full_barrier());
    }
  }

  // --- The state warpgroup ---

  using accumulators = float[m_blocks][columns / 2];

  // Calls visit(element of a head's state, accumulator) for those that there are.
  template <class Visit>
  __device__ __forceinline__ void for_each_element(accumulators& state, const Visit& visit) const {
#pragma unroll
    for (int m = 0; m < m_blocks; ++m) {
#pragma unroll
      for (int j = 0; j < columns / 2; ++j) {
        const int row = first_row_of_state + j / 4 * 8 + 2 * pair() + j % 2;
        const int feature = 64 * m + 16 * warp() + group() + j / 2 % 2 * 8;
        if (form.dim % columns == 0 || row < form.dim)
          visit(row * form.state_dim + feature, state[m][j]);
      }
    }
  }

  // Sᵀ in bf16, [state_dim, columns].
  __device__ __forceinline__ void share_state(const accumulators& state, u32 to) const {
#pragma unroll
    for (int m = 0; m < m_blocks; ++m) {
#pragma unroll
      for (int n = 0; n < columns / 16; ++n) {
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          word[i] = pack<T>(state[m][8 * n + 2 * i], state[m][8 * n + 2 * i + 1]);
        store_matrices<false>(
            to + place_of(64 * m + 16 * warp() + lane() % 16, 2 * n + lane() / 16, state_slab),
            word);
      }
    }
  }

  // A of the state's product: features of block m, scaled, by all tokens.
  __device__ __forceinline__ void load_scaled(u32 stage, int m, int tokens,
                                              u32 (&a)[chunk_tokens / 16][4]) const {
#pragma unroll
    for (int step = 0; step < chunk_tokens / 16; ++step) {
      const int row = 16 * step + lane() / 16 * 8 + lane() % 8;
      const int vector = 2 * warp() + lane() / 8 % 2;
      load_matrices_transposed(
          a[step][0], a[step][1], a[step][2], a[step][3],
          stage + plan.b_tile + m * chunk_tokens * 128 + row * 128 + ((vector ^ row % 8) * 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 16 * step + i / 2 * 8 + 2 * pair();
        const float2 factor = load_shared_pair(stage + factor_at(ssd_sm90_factor::write, token));
        float low, high;
        unpack<T>(a[step][i], low, high);
        a[step][i] = pack<T>(token < tokens ? low * factor.x : 0.0f,
                             token + 1 < tokens ? high * factor.y : 0.0f);
      }
    }
  }

  __device__ __forceinline__ void walk_state(i64 place, bool begins) const {
    accumulators state;
    const State* const from = begins ? static_cast<const State*>(p.state_in) + place : nullptr;
#pragma unroll
    for (int m = 0; m < m_blocks; ++m) {
#pragma unroll
      for (int j = 0; j < columns / 2; ++j) state[m][j] = 0.0f;
    }
    if (from != nullptr)
      for_each_element(state, [&](int at, float& value) { value = to_float(from[at]); });
    stages of = pipe();
    for (int chunk = 0; chunk < chunks; ++chunk, of.advance()) {
      barrier_wait(state_empty(chunk % 2), (chunk / 2 & 1) ^ 1);
      share_state(state, state_place(chunk % 2));
      async_proxy_fence();
      arrive(state_full(chunk % 2));
      of.wait_full();
      const u32 stage = of.buffer();
      const float kept =
          load_shared_float(stage + factor_at(ssd_sm90_factor::decay, chunk_tokens - 1));
      const u64 x = wgmma_swizzled_descriptor<plan.slab_row, x_slab>(stage + plan.x_tile);
      const int tokens = tokens_of(chunk);
#pragma unroll
      for (int m = 0; m < m_blocks; ++m) {
        u32 a[chunk_tokens / 16][4];
        load_scaled(stage, m, tokens, a);
#pragma unroll
        for (int j = 0; j < columns / 2; ++j) state[m][j] *= kept;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < chunk_tokens / 16; ++step)
          wgmma_of_width<T, columns, true>(state[m], a[step],
                                           wgmma_advance(x, step * 16 * plan.slab_row), 1);
        wgmma_commit();
        // No more than two blocks' operands are in registers.
        if constexpr (m_blocks > 2) wgmma_wait<1>();
      }
      wgmma_wait<0>();
      release(of.empty_barrier());
    }
    if (p.state_out == nullptr) return;
    State* const to = static_cast<State*>(p.state_out) + place;
    for_each_element(state,
                     [&](int at, float& value) { to[at] = from_float<State>(number(value)); });
  }

  // --- Output warpgroups ---

  __device__ __forceinline__ void write_out(int warpgroup) const {
    using factor = ssd_sm90_factor;
    const ssd_head<form> parameters(params.ssd, p, head);
    const u32 staging = base + plan.out + warpgroup * plan.out_bytes;
    const u64 S = wgmma_swizzled_descriptor<plan.slab_row, state_slab>(state_place(warpgroup));
    const int token[2] = {16 * warp() + group(), 16 * warp() + group() + 8};
    stages of = pipe();
    of.advance(static_cast<u32>(warpgroup));
    for (int chunk = warpgroup; chunk < chunks; chunk += 2, of.advance(2)) {
      float products[chunk_tokens / 2], out[columns / 2];
      of.wait_full();
      const u32 stage = of.buffer();
      const u64 C = wgmma_swizzled_descriptor<128>(stage + plan.c_tile);
      const u64 B = wgmma_swizzled_descriptor<128>(stage + plan.b_tile);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < form.state_dim / 16; ++step) {
        const int at = step / 4 * chunk_tokens * 128 + step % 4 * 32;
        wgmma<T, chunk_tokens>(products, wgmma_advance(C, at), wgmma_advance(B, at), step > 0);
      }
      wgmma_commit();
      barrier_wait(state_full(warpgroup), chunk / 2 & 1);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < form.state_dim / 16; ++step)
        wgmma<T, columns, false, true>(
            out, wgmma_advance(C, step / 4 * chunk_tokens * 128 + step % 4 * 32),
            wgmma_advance(S, step * 16 * plan.slab_row), step > 0);
      wgmma_commit();
      wgmma_wait<1>();
      // M, as A of the next product.
      u32 m[chunk_tokens / 16][4];
      const float sum[2] = {load_shared_float(stage + factor_at(factor::sum, token[0])),
                            load_shared_float(stage + factor_at(factor::sum, token[1]))};
#pragma unroll
      for (int tile = 0; tile < chunk_tokens / 8; ++tile) {
        const int column = 8 * tile + 2 * pair();
        const float2 before = load_shared_pair(stage + factor_at(factor::before, column));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float low = products[4 * tile + 2 * half] * approximate_exp2(sum[half] - before.x);
          const float high =
              products[4 * tile + 2 * half + 1] * approximate_exp2(sum[half] - before.y);
          m[tile / 2][tile % 2 * 2 + half] =
              pack<T>(column <= token[half] ? low : 0.0f, column + 1 <= token[half] ? high : 0.0f);
        }
      }
      wgmma_wait<0>();
      arrive(state_empty(warpgroup));
      const float decay[2] = {load_shared_float(stage + factor_at(factor::decay, token[0])),
                              load_shared_float(stage + factor_at(factor::decay, token[1]))};
#pragma unroll
      for (int j = 0; j < columns / 2; ++j) out[j] *= decay[j / 2 % 2];
      const u64 x = wgmma_swizzled_descriptor<plan.slab_row, x_slab>(stage + plan.x_tile);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < chunk_tokens / 16; ++step)
        wgmma_of_width<T, columns, true>(out, m[step], wgmma_advance(x, step * 16 * plan.slab_row),
                                         1);
      wgmma_commit();
      wgmma_wait<0>();
      // Through shared memory to whole rows, each warp by itself.
#pragma unroll
      for (int n = 0; n < columns / 16; ++n) {
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float low = number(out[8 * n + 2 * i]), high = number(out[8 * n + 2 * i + 1]);
          if constexpr (form.skip) {
            float x_low, x_high;
            unpack<T>(load_shared_word(stage + plan.x_tile +
                                       place_of(token[i % 2], 2 * n + i / 2, x_slab) + 4 * pair()),
                      x_low, x_high);
            low += parameters.D * x_low;
            high += parameters.D * x_high;
          }
          word[i] = pack<T>(low, high);
        }
        store_matrices<false>(
            staging + place_of(16 * warp() + lane() % 16, 2 * n + lane() / 16, x_slab), word);
      }
      release(of.empty_barrier());
      store_rows(chunk, staging);
    }
  }

  __device__ __forceinline__ void store_rows(int chunk, u32 staging) const {
    constexpr int vectors = columns / 8;
    T* const to = static_cast<T*>(p.out) + static_cast<i64>(head) * form.dim + first_row_of_state;
#pragma unroll 2
    for (int i = 0; i < 16 * vectors / 32; ++i) {
      const int at = 32 * i + lane(), row = 16 * warp() + at / vectors, vector = at % vectors;
      const int token = chunk * chunk_tokens + row;
      const float4 value = load_shared(staging + place_of(row, vector, x_slab));
      if (token < count && (form.dim % columns == 0 || first_row_of_state + 8 * vector < form.dim))
        *reinterpret_cast<float4*>(to + (first + token) * p.v_heads * form.dim + 8 * vector) =
            value;
    }
    __syncwarp();
  }
};

template <ssd_form form, ssd_sm90_config c>
__global__ void __launch_bounds__(ssd_sm90_threads, 1)
    ssd_chunks_sm90(const __grid_constant__ ssd_sm90_params params) {
  using Walk = ssd_sm90_walk<form, c>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  wait_and_launch_dependents();
  const delta_rule_params& p = params.ssd.layer;
  const int of_head = static_cast<int>(blockIdx.x) / Walk::blocks;
  const int index = of_head / p.v_heads, head = of_head - index * p.v_heads;
  const delta_rule_sequence sequence = sequence_of(p, index);
  const int count = sequence.end - sequence.first;
  const Walk walk{params,
                  p,
                  shared_address(shared_memory),
                  head,
                  static_cast<int>(blockIdx.x) % Walk::blocks * Walk::columns,
                  first_row(p, sequence, index),
                  count,
                  ceil_div(count, ssd_sm90_chunk)};
  if (sequence.state < 0) {
    // Padding: zeros.
    for (int i = static_cast<int>(threadIdx.x); i < count * Walk::columns; i += ssd_sm90_threads) {
      const int v = walk.first_row_of_state + i % Walk::columns;
      if (v < form.dim)
        static_cast<bf16*>(
            p.out)[((walk.first + i / Walk::columns) * p.v_heads + head) * form.dim + v] =
            from_float<bf16>(0.0f);
    }
    return;
  }
  if (threadIdx.x == 0) walk.init_barriers();
  if constexpr (c.cluster > 1) {
    cluster_barrier();
  } else {
    __syncthreads();
  }
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(int{Walk::plan.producer_registers}));
    if (Walk::warp() == 0) {
      if (is_elected()) walk.load();
    } else if (Walk::warp() == 1) {
      walk.find_factors();
    }
  } else if (warpgroup == 1) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(int{Walk::plan.state_registers}));
    const i64 place =
        sequence.state * p.state_block + static_cast<i64>(head) * form.dim * form.state_dim;
    walk.walk_state(place,
                    p.state_in != nullptr && (p.has_state == nullptr || p.has_state[index] != 0));
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(int{Walk::plan.out_registers}));
    walk.write_out(warpgroup - 2);
  }
  // Peers load into this CTA, and arrive at its barriers.
  if constexpr (c.cluster > 1) {
    __syncwarp();
    cluster_barrier();
  }
}

}  // namespace fftune
