// y = (act(x Wg^T) * (x Wu^T)) Wd^T for up to 16 tokens in one launch, for weights that the
// registers of the device hold: all loads are on their way before the first is used.
//
// Every block owns `rows` hidden features and `out_rows` features of y, 8 to a group; its warps
// split k. The intermediate goes from block to block through L2 in tagged words, so the second
// product starts as soon as its operands are there. All blocks must be resident at once: launch
// cooperatively. Operands go from memory straight into the fragments of mma.sync, 16 bytes a load:
// see gemm/decode.cuh.
//
// Grid: enough blocks for h / rows and d / out_rows. Block: warps * 32 threads. Shared memory:
// warps * larger(2 rows, out_rows) * tokens * 4 bytes. `workspace`: 256 bytes whose first 8 are the
// tag of the run before, then [m, h / 4] tagged words; its contents do not matter before the first
// run. d and h are multiples of 8, pointers 16-byte aligned.
#include "common/activation.cuh"
#include "common/dependency.cuh"
#include "common/mma.cuh"
#include "common/tagged.cuh"
#include "common/vector.cuh"

namespace fftune {

// One warp's part of a product: `steps` times 32 elements of k of `groups` times 8 rows of weights,
// in registers, and the sums with up to 16 tokens.
template <class T, int tokens, int groups, int steps>
struct decode_slice {
  vector16 weight[groups][steps];
  float sum[groups][4];

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
      weight[group][step] = place(step) < k ? load_streaming(from + place(step)) : vector16{};
    }
  }
  __device__ __forceinline__ void multiply(int step, const vector16 (&token)[tokens / 8]) {
    const vector16& low = token[0];
    const vector16& high = token[tokens / 8 - 1];
#pragma unroll
    for (int part = 0; part < 4; part += 2) {
      const u32 a[4] = {low.word[part], tokens == 16 ? high.word[part] : 0u, low.word[part + 1],
                        tokens == 16 ? high.word[part + 1] : 0u};
#pragma unroll
      for (int group = 0; group < groups; ++group) {
        const vector16& from = weight[group][step];
        const u32 b[2] = {from.word[part], from.word[part + 1]};
        mma_16x8x16<T>(sum[group], a, b);
      }
    }
  }
  // Leaves the sums as [warp][group][token][8].
  __device__ __forceinline__ void publish(float* shared) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int group = 0; group < groups; ++group) {
#pragma unroll
      for (int half = 0; half < tokens / 8; ++half) {
        float* const to = shared + ((warp * groups + group) * tokens + half * 8) * 8 + lane * 2;
        to[0] = sum[group][half * 2];
        to[1] = sum[group][half * 2 + 1];
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

// `patient`: a thread waits for one word of a batch before it asks for the others, which keeps the
// way free for those that are late but costs a trip more. `late`: the second product's weights are
// asked for when half of the first's have come, so that they do not hold those up.
template <class T, class Activation, int tokens, int rows, int out_rows, int warps, int steps,
          int out_steps, bool patient, bool late>
__global__ void __launch_bounds__(warps * 32, 1)
    ffn_decode(const T* x, const T* w_gate, const T* w_up, const T* w_down, T* y,
               unsigned char* workspace, int m, int d, int h) {
  constexpr int threads = warps * 32, groups = rows / 8, out_groups = out_rows / 8;
  constexpr int halves = tokens / 8;
  extern __shared__ __align__(16) float shared[];
  __shared__ u64 shared_tag;
  unsigned char* const hidden = workspace + 256;
  const int lane = threadIdx.x % 32;
  const int first_row = static_cast<int>(blockIdx.x) * rows;
  const int first_out = static_cast<int>(blockIdx.x) * out_rows;

  decode_slice<T, tokens, 2 * groups, steps> first = {};
  decode_slice<T, tokens, out_groups, out_steps> second = {};
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
  if constexpr (!late) load_second();
  wait_for_dependencies();
  launch_dependents();
  if (threadIdx.x == 0) shared_tag = *reinterpret_cast<volatile u64*>(workspace);

#pragma unroll
  for (int step = 0; step < steps; ++step) {
    vector16 token[halves];
    const int k = first.place(step);
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      const int row = lane / 4 + half * 8;
      token[half] =
          row < m && k < d ? load_dependent(x + static_cast<i64>(row) * d + k) : vector16{};
    }
    first.multiply(step, token);
    if (late && step == (steps - 1) / 2) load_second();
  }
  first.publish(shared);
  __syncthreads();  // nobody writes a tagged word before all threads of the block can know the tag
  const u64 tag = next_tag(shared_tag);
#pragma unroll
  for (int base = 0; base < groups * tokens * 8; base += threads) {
    const int index = base + static_cast<int>(threadIdx.x);
    constexpr int stride = 2 * groups * tokens * 8;
    const bool valid = groups * tokens * 8 % threads == 0 || index < groups * tokens * 8;
    const float gate = valid ? add_warps<warps, stride>(shared, index) : 0.0f;
    const float up = valid ? add_warps<warps, stride>(shared + groups * tokens * 8, index) : 0.0f;
    const float value = Activation::value(gate) * up;
    const u32 pair = pack<T>(value, __shfl_down_sync(~0u, value, 1));
    const u32 next_pair = __shfl_down_sync(~0u, pair, 2);
    const int row = first_row + index / (tokens * 8) * 8 + index % 8;
    const int token = index / 8 % tokens;
    if (valid && index % 4 == 0 && row < h && token < m) {
      store_tagged(hidden + (static_cast<i64>(token) * h + row) * 4, pair, next_pair, tag);
    }
  }
  if (first_out >= d) return;

  // In batches of up to 16 words a thread.
  constexpr int batch = out_steps < 8 / halves ? out_steps : 8 / halves;
#pragma unroll
  for (int base = 0; base < out_steps; base += batch) {
    tagged_word word[batch][halves][2];
    bool ready = !patient || lane / 4 >= m || second.place(base) >= h;
    const unsigned char* const own =
        hidden + (static_cast<i64>(lane / 4) * h + second.place(base)) * 4;
    while (!ready) ready = load_tagged(own).tag == tag;
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
            word[i][half][part] = valid ? load_tagged(from + part * 16) : tagged_word{{0, 0}, tag};
            ready = ready && word[i][half][part].tag == tag;
          }
        }
      }
    } while (!ready);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (base + i < out_steps) {
        vector16 token[halves];
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          token[half] = {{word[i][half][0].data[0], word[i][half][0].data[1],
                          word[i][half][1].data[0], word[i][half][1].data[1]}};
        }
        second.multiply(base + i, token);
      }
    }
  }
  __syncthreads();  // the first product's sums are read
  second.publish(shared);
  __syncthreads();
  // Every block has written its words by now, and so knows the tag of this run.
  if (blockIdx.x == 0 && threadIdx.x == 0) *reinterpret_cast<volatile u64*>(workspace) = tag;
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

}  // namespace fftune
