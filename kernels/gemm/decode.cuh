// C = epilogue(A B1^T[, A B2^T]) for a handful of tokens: A [m, k] with m <= tokens <= 16, B [n,
// k], a C [m, n] for each output, row-major; k and n multiples of 8 and all pointers 16-byte
// aligned.
//
// The weights B are most of the bytes, and each is needed once: they go from memory straight into
// the registers of mma.sync, 16 bytes a load, without shared memory or ldmatrix. That works because
// a sum over k may be taken in any order as long as both operands agree: a thread loads eight
// consecutive k of its row and calls the first four elements "k 2*pair..+1 and k+8..+9" of one
// m16n8k16 and the last four those of the next.
//
// A block owns `rows` rows of B. Its warps take groups of 32 * unroll elements of k in turn, so
// that a warp has products * rows/8 * unroll loads in flight, and add their sums up through shared
// memory, in order.
#pragma once

#include "common/dependency.cuh"
#include "common/mma.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/split_k.cuh"

namespace fftune {

template <class T, int products>
struct decode_arguments {
  const T* a;
  const T* b[products];
  T* c[most_outputs];
  split_k_workspace workspace;
  int m, n, k;
  int split_k;  // gridDim.y
  addends<T> more = {};
};

template <class T, class Epilogue, int tokens, int rows, int warps, int unroll>
class decode_gemm {
  static constexpr int products = Epilogue::products, outputs = Epilogue::outputs;
  static constexpr int threads = warps * 32;
  static constexpr int row_groups = rows / 8;
  static constexpr int group_k = 32 * unroll;
  static constexpr int values =
      tokens / 4;  // sums a thread of the mma fragment has for one row group
  static_assert(tokens == 8 || tokens == 16);
  static_assert(rows % 8 == 0 && row_groups <= warps, "one row group a warp in the closing sum");

  using sums = float[products][row_groups][4];
  using arguments_type = decode_arguments<T, products>;

  // One warp's operands for one group of k.
  struct operands {
    vector16 b[products][row_groups][unroll];
    vector16 a[unroll][tokens / 8];
  };

  // Where this lane reads: element k = 8 * (lane % 4) of its rows.
  struct pointers {
    const T* b[products][row_groups];
    const T* a[tokens / 8];
    bool token_is_valid[tokens / 8];
    u32 k_left;  // elements from this lane's place to the end of k
  };

  template <bool ragged>
  static __device__ __forceinline__ void load_weights(operands& to, const pointers& from, u32 k) {
#pragma unroll
    for (int step = 0; step < unroll; ++step) {
      const u32 at = k + step * 32;
      const bool valid = !ragged || at < from.k_left;
#pragma unroll
      for (int product = 0; product < products; ++product) {
#pragma unroll
        for (int group = 0; group < row_groups; ++group) {
          to.b[product][group][step] =
              valid ? load_streaming(from.b[product][group] + at) : vector16{};
        }
      }
    }
  }

  template <bool ragged>
  static __device__ __forceinline__ void load_tokens(operands& to, const pointers& from, u32 k) {
#pragma unroll
    for (int step = 0; step < unroll; ++step) {
      const u32 at = k + step * 32;
      const bool valid = !ragged || at < from.k_left;
#pragma unroll
      for (int half = 0; half < tokens / 8; ++half) {
        to.a[step][half] =
            valid && from.token_is_valid[half] ? load_dependent(from.a[half] + at) : vector16{};
      }
    }
  }

  static __device__ __forceinline__ void multiply(sums& sum, const operands& operand) {
    __syncwarp();  // or the compiler moves products up between the loads, to save registers, and
                   // leaves two loads in flight instead of all of them
#pragma unroll
    for (int step = 0; step < unroll; ++step) {
#pragma unroll
      for (int part = 0; part < 4; part += 2) {
        const vector16& low = operand.a[step][0];
        const vector16& high = operand.a[step][tokens / 8 - 1];
        const u32 a[4] = {low.word[part], tokens == 16 ? high.word[part] : 0u, low.word[part + 1],
                          tokens == 16 ? high.word[part + 1] : 0u};
#pragma unroll
        for (int product = 0; product < products; ++product) {
#pragma unroll
          for (int group = 0; group < row_groups; ++group) {
            const vector16& weight = operand.b[product][group][step];
            const u32 b[2] = {weight.word[part], weight.word[part + 1]};
            mma_16x8x16<T>(sum[product][group], a, b);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ pointers make_pointers(const arguments_type& arguments,
                                                           int first_row, int lane) {
    pointers result;
    const int lane_k = lane % 4 * 8;
#pragma unroll
    for (int group = 0; group < row_groups; ++group) {
      const int row = first_row + group * 8 + lane / 4;
      const i64 place = static_cast<i64>(smaller(row, arguments.n - 1)) * arguments.k + lane_k;
#pragma unroll
      for (int product = 0; product < products; ++product) {
        result.b[product][group] =
            arguments.b[product] + place;  // rows past n are read again, never stored
      }
    }
#pragma unroll
    for (int half = 0; half < tokens / 8; ++half) {
      const int token = lane / 4 + half * 8;
      result.token_is_valid[half] = token < arguments.m;
      result.a[half] = arguments.a + static_cast<i64>(token) * arguments.k + lane_k;
    }
    result.k_left = larger(arguments.k - lane_k, 0);
    return result;
  }

  // The sums of all warps, in order, for the row group that this thread's warp is to finish.
  static __device__ __forceinline__ void add_warps(float4 (&total)[products], const sums& sum,
                                                   float* shared, int warp, int lane) {
    constexpr int warp_stride = products * row_groups * 32 * values;
    float* const mine = shared + warp * warp_stride + lane * values;
#pragma unroll
    for (int product = 0; product < products; ++product) {
#pragma unroll
      for (int group = 0; group < row_groups; ++group) {
#pragma unroll
        for (int value = 0; value < values; ++value) {
          mine[(product * row_groups + group) * 32 * values + value] = sum[product][group][value];
        }
      }
    }
    __syncthreads();
    if (warp < row_groups) {
#pragma unroll
      for (int product = 0; product < products; ++product) {
        float result[4] = {};
#pragma unroll
        for (int other = 0; other < warps; ++other) {
#pragma unroll
          for (int value = 0; value < values; ++value) {
            result[value] +=
                shared[other * warp_stride + (product * row_groups + warp) * 32 * values +
                       lane * values + value];
          }
        }
        total[product] = {result[0], result[1], result[2], result[3]};
      }
    }
  }

  template <int output = 0>
  static __device__ __forceinline__ void store_pair(const arguments_type& arguments, int token,
                                                    int column, const float (&first)[products],
                                                    const float (&second)[products]) {
    if (token < arguments.m && column < arguments.n) {
      T* const place = arguments.c[output] + static_cast<i64>(token) * arguments.n + column;
      float value = output_of<Epilogue, output>(first);
      float next = output_of<Epilogue, output>(second);
      arguments.more.template add<Epilogue>(value, next, token, column, arguments.n);
      *reinterpret_cast<u32*>(place) = pack<T>(value, next);
    }
    if constexpr (output + 1 < outputs) {
      store_pair<output + 1>(arguments, token, column, first, second);
    }
  }

 public:
  // The closing sums of the warps, or the exchange of a cluster.
  static constexpr int shared_bytes = products * row_groups * larger(warps * values * 128, 512);

  static __device__ __forceinline__ void run(const arguments_type& arguments,
                                             unsigned char* shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_row = static_cast<int>(blockIdx.x) * rows;
    const pointers from = make_pointers(arguments, first_row, lane);

    // In 32 bits: k < 2^31, group_k >= 32 and fewer than 32 splits.
    const u32 groups = ceil_div(static_cast<u32>(arguments.k), static_cast<u32>(group_k));
    const u32 split = blockIdx.y, split_k = arguments.split_k;
    const u32 first_group = groups * split / split_k, last_group = groups * (split + 1) / split_k;
    const u32 whole_groups = static_cast<u32>(arguments.k) / group_k;

    launch_dependents();
    sums sum = {};
    operands operand;
    // Weights are there from the start; the tokens may still be on their way from the kernel
    // before.
    bool waited = false;
    const auto tokens_ready = [&waited] {
      if (!waited) wait_for_dependencies();
      waited = true;
    };
    u32 group = first_group + warp;
    for (; group < smaller(last_group, whole_groups); group += warps) {
      load_weights<false>(operand, from, group * group_k);
      tokens_ready();
      load_tokens<false>(operand, from, group * group_k);
      multiply(sum, operand);
    }
    if (group < last_group) {  // the one group that k ends in
      load_weights<true>(operand, from, group * group_k);
      tokens_ready();
      load_tokens<true>(operand, from, group * group_k);
      multiply(sum, operand);
    }
    tokens_ready();  // a warp without a group must not store before the kernels before are done

    float4 total[products] = {};
    add_warps(total, sum, reinterpret_cast<float*>(shared), warp, lane);
    if (arguments.split_k > 1) {
      __syncthreads();  // the warps' sums are read
      if (!reduce_splits<row_groups * 32>(total, warp < row_groups, arguments.split_k,
                                          arguments.workspace, shared)) {
        return;
      }
    }
    if (warp < row_groups) {
      const int column = first_row + warp * 8 + lane % 4 * 2;
      float value[4][products];
#pragma unroll
      for (int product = 0; product < products; ++product) {
        value[0][product] = total[product].x;
        value[1][product] = total[product].y;
        value[2][product] = total[product].z;
        value[3][product] = total[product].w;
      }
      store_pair(arguments, lane / 4, column, value[0], value[1]);
      if constexpr (tokens == 16) {
        store_pair(arguments, lane / 4 + 8, column, value[2], value[3]);
      }
    }
  }
};

}  // namespace fftune
