// The fused decode engine: y = (act(x Wg^T) * (x Wu^T)) Wd^T for up to 16 tokens in one launch, for
// weights that fit in the registers of the device: all loads are in flight before the first is
// used. K-major 16-bit matrices, 16-byte aligned rows and pointers.
//
// Every block computes `rows` hidden features and `out_rows` features of y, 8 to a group; its warps
// split k. The intermediate goes from block to block through L2 in words that contain a flag beside
// the data (common/async.cuh), so the second GEMM starts as soon as its operands are there.
// All blocks must be resident at once: the launch is cooperative. Weights stay in registers, as
// operands of the MMAs of decode/stream.cuh.
//
//   all threads    load W_gate, W_up (and W_down, unless late_down) into registers
//                  griddepcontrol.wait; MMA with x
//   shared memory  Accumulators [warp][group][token][8], first of gate and up, then of y.
//   L2             Flagged words of hidden [m, h / 4]: written by the block that computes the
//                  feature, read by all; polled until a word has the flag of this run
//   barriers       `__syncthreads` after the accumulators are in shared memory, before they are
//                  written over, and none between blocks
//
// Grid: enough blocks for h / rows and d / out_rows. Block: config.threads(). Shared memory:
// config.shared_bytes(). The workspace: 256 bytes whose first 8 are the flag of the run before,
// then the flagged words; its contents do not matter before the first run.
#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/vectors.cuh"
#include "gemm/decode/fused_config.cuh"
#include "gemm/decode/stream.cuh"
#include "gemm/epilogue_ops.cuh"

namespace fftune {

// One warp's part of a GEMM: `steps` times 32 elements of k of `groups` times 8 rows of weights,
// in registers, and the accumulators of up to 16 tokens.
template <class T, stream_shape shape>
struct weight_slice {
  using stream = weight_stream<T, T, shape, load_path::read_only, stream_bounds::every_load>;
  static constexpr int tokens = shape.tokens, groups = shape.n_fragments(), steps = shape.unroll;

  vector16 weight[1][groups][steps];
  typename stream::accumulators sum;

  // Where this lane's 8 elements of a step lie along k.
  static __device__ __forceinline__ int place(int step) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return (warp * steps + step) * 32 + lane % 4 * 8;
  }
  // Rows past the end are read again and never stored; k past the end counts as zeros.
  __device__ __forceinline__ void load(int group, const T* weights, int row, int rows, int k) {
    const int lane = threadIdx.x % 32;
    const T* const from = weights + static_cast<i64>(smaller(row + lane / 4, rows - 1)) * k;
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      weight[0][group][step] = place(step) < k ? load_streaming(from + place(step)) : vector16{};
    }
  }
  __device__ __forceinline__ void mma(int step, const typename stream::token_group& token) {
    const no_scale none[1][groups][steps] = {};
    stream::multiply_step(sum, weight, none, token, step);
  }
  // Leaves the accumulators as [warp][group][token][8].
  __device__ __forceinline__ void publish(float* shared) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int group = 0; group < groups; ++group) {
#pragma unroll
      for (int half = 0; half < tokens / 8; ++half) {
        float* const to = shared + ((warp * groups + group) * tokens + half * 8) * 8 + lane * 2;
        to[0] = sum[0][group][half * 2];
        to[1] = sum[0][group][half * 2 + 1];
      }
    }
  }
};

// The sum over warps of element `index` of a group onwards, in their order.
template <int warps, int stride>
__device__ __forceinline__ float add_warps(const float* shared, int index) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < warps; ++warp) sum += shared[warp * stride + index];
  return sum;
}

// The elements of hidden of this block, from the warps' accumulators, as flagged words.
template <class T, class activation, fused_decode_config config>
__device__ __forceinline__ void send_hidden(unsigned char* hidden, const float* shared,
                                            int first_row, int m, int h, u64 flag) {
  constexpr int tokens = config.tokens, warps = config.warps;
  constexpr int threads = warps * 32, groups = config.rows / 8;
#pragma unroll
  for (int base = 0; base < groups * tokens * 8; base += threads) {
    const int index = base + static_cast<int>(threadIdx.x);
    constexpr int stride = 2 * groups * tokens * 8;
    const bool valid = groups * tokens * 8 % threads == 0 || index < groups * tokens * 8;
    const float gate = valid ? add_warps<warps, stride>(shared, index) : 0.0f;
    const float up = valid ? add_warps<warps, stride>(shared + groups * tokens * 8, index) : 0.0f;
    const float value = activation::value(gate) * up;
    const u32 pair = pack<T>(value, __shfl_down_sync(~0u, value, 1));
    const u32 next_pair = __shfl_down_sync(~0u, pair, 2);
    const int row = first_row + index / (tokens * 8) * 8 + index % 8;
    const int token = index / 8 % tokens;
    if (valid && index % 4 == 0 && row < h && token < m) {
      store_flagged(hidden + (static_cast<i64>(token) * h + row) * 4, pair, next_pair, flag);
    }
  }
}

// The elements of y of this block.
template <class T, fused_decode_config config>
__device__ __forceinline__ void store_out(T* y, const float* shared, int first_out, int m, int d) {
  constexpr int tokens = config.tokens, warps = config.warps;
  constexpr int threads = warps * 32, out_groups = config.out_rows / 8;
#pragma unroll
  for (int base = 0; base < out_groups * tokens * 8; base += threads) {
    const int index = base + static_cast<int>(threadIdx.x);
    const bool valid = out_groups * tokens * 8 % threads == 0 || index < out_groups * tokens * 8;
    const float value = valid ? add_warps<warps, out_groups * tokens * 8>(shared, index) : 0.0f;
    const float next = __shfl_down_sync(~0u, value, 1);
    const int row = first_out + index / (tokens * 8) * 8 + index % 8;
    const int token = index / 8 % tokens;
    if (valid && index % 2 == 0 && row < d && token < m) {
      *reinterpret_cast<u32*>(y + static_cast<i64>(token) * d + row) = pack<T>(value, next);
    }
  }
}

// Eight elements of each of a lane's tokens, from `k` on; zeros where there are none.
template <class T, int halves>
__device__ __forceinline__ void load_tokens(vector16 (&token)[halves][1], const T* x, int k,
                                            int lane, int m, int d) {
#pragma unroll
  for (int half = 0; half < halves; ++half) {
    const int row = lane / 4 + half * 8;
    token[half][0] =
        row < m && k < d ? load_dependent(x + static_cast<i64>(row) * d + k) : vector16{};
  }
}
template <int halves>
__device__ __forceinline__ void unpack_words(vector16 (&token)[halves][1],
                                             const flagged_word (&word)[halves][2]) {
#pragma unroll
  for (int half = 0; half < halves; ++half) {
    token[half][0] = {{word[half][0].data[0], word[half][0].data[1], word[half][1].data[0],
                       word[half][1].data[1]}};
  }
}

// `form` is that of the first GEMM.
template <gemm_form form, fused_decode_config config>
__global__ void __launch_bounds__(config.threads(), 1)
    fused_decode_gemm(const __grid_constant__ fused_decode_params p) {
  using T = element_type<form.ab>;
  using activation = activation_of<form.activation>;
  constexpr int tokens = config.tokens, rows = config.rows, out_rows = config.out_rows;
  constexpr int warps = config.warps, steps = config.steps, out_steps = config.out_steps;
  const int m = p.gate_up.m, d = p.gate_up.k, h = p.gate_up.n;
  const T* const x = static_cast<const T*>(p.gate_up.a[0]);
  const T* const w_gate = static_cast<const T*>(p.gate_up.b[0][0]);
  const T* const w_up = static_cast<const T*>(p.gate_up.b[0][1]);
  const T* const w_down = static_cast<const T*>(p.down.b[0][0]);
  T* const y = static_cast<T*>(p.down.c[0][0]);
  constexpr int threads = warps * 32, groups = rows / 8, out_groups = out_rows / 8;
  constexpr int halves = tokens / 8;
  extern __shared__ __align__(16) float shared[];
  __shared__ u64 shared_flag;
  unsigned char* const workspace = p.workspace;
  unsigned char* const hidden = workspace + 256;
  const int lane = threadIdx.x % 32;
  const int first_row = static_cast<int>(blockIdx.x) * rows;
  const int first_out = static_cast<int>(blockIdx.x) * out_rows;

  weight_slice<T, config.gate_up()> first = {};
  weight_slice<T, config.down()> second = {};
#pragma unroll
  for (int group = 0; group < groups; ++group) {
    first.load(group, w_gate, first_row + group * 8, h, d);
    first.load(groups + group, w_up, first_row + group * 8, h, d);
  }
  const auto load_second = [&] {
#pragma unroll
    for (int group = 0; group < out_groups; ++group) {
      second.load(group, w_down, first_out + group * 8, d, h);
    }
  };
  if constexpr (!config.late_down) load_second();
  wait_for_dependencies();
  launch_dependents();
  if (threadIdx.x == 0) shared_flag = *reinterpret_cast<volatile u64*>(workspace);

#pragma unroll
  for (int step = 0; step < steps; ++step) {
    vector16 token[halves][1];
    load_tokens(token, x, first.place(step), lane, m, d);
    first.mma(step, token);
    if (config.late_down && step == (steps - 1) / 2) load_second();
  }
  first.publish(shared);
  __syncthreads();  // no flagged word is written before all threads of the block know the flag
  const u64 flag = next_flag(shared_flag);
  send_hidden<T, activation, config>(hidden, shared, first_row, m, h, flag);
  if (first_out >= d) return;

  // In batches of up to 16 words a thread.
  constexpr int batch = out_steps < 8 / halves ? out_steps : 8 / halves;
#pragma unroll
  for (int base = 0; base < out_steps; base += batch) {
    flagged_word word[batch][halves][2];
    bool ready = !config.poll_first || lane / 4 >= m || second.place(base) >= h;
    const unsigned char* const own =
        hidden + (static_cast<i64>(lane / 4) * h + second.place(base)) * 4;
    while (!ready) ready = load_flagged(own).flag == flag;
    do {
      ready = true;
#pragma unroll
      for (int i = 0; i < batch; ++i) {
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          const int row = lane / 4 + half * 8;
          const int k = second.place(base + i);
          const bool valid = base + i < out_steps && row < m && k < h;
          const unsigned char* const from = hidden + (static_cast<i64>(row) * h + k) * 4;
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            word[i][half][part] =
                valid ? load_flagged(from + part * 16) : flagged_word{{0, 0}, flag};
            ready = ready && word[i][half][part].flag == flag;
          }
        }
      }
    } while (!ready);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (base + i < out_steps) {
        vector16 token[halves][1];
        unpack_words(token, word[i]);
        second.mma(base + i, token);
      }
    }
  }
  __syncthreads();  // the first GEMM's accumulators are read
  second.publish(shared);
  __syncthreads();
  // Every block has written its words by now, and so knows the flag of this run.
  if (blockIdx.x == 0 && threadIdx.x == 0) *reinterpret_cast<volatile u64*>(workspace) = flag;
  store_out<T, config>(y, shared, first_out, m, d);
}

}  // namespace fftune
