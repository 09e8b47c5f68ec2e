// The core of the kernels for few tokens: a stream of weights, each read once, multiplied by up to
// 16 rows of tokens with mma.sync m16n8k16. Rows of a GEMM, experts of a mixture, both products of
// a gated layer and whole layers are policies over it: they decide which rows a warp streams, and
// what becomes of the accumulators.
//
// A sum over k may be taken in any order as long as both operands agree. So a lane reads 16 bytes
// of a row, which are consecutive elements of k, and takes them in groups of four as the elements
// "k 2*pair..+1 and k+8..+9" of one MMA after the other. No ldmatrix is needed, and weights may go
// from memory straight into registers:
//
//     k ->          lane % 4:   0       1       2       3    |   0   ...
//     row lane / 4           16 bytes  16 B    16 B    16 B  |  next step
//
//   weight_stream   weights in registers, as B: 8 rows of them are a fragment, tokens are A
//   warp_reduction  the accumulators of a block's warps, added up in order
//
// stream_type.cuh has the types of elements, stream_shape.cuh the registers and shared memory.
#pragma once

#include "common/mma.cuh"
#include "common/vectors.cuh"
#include "gemm/decode/stream_shape.cuh"
#include "gemm/decode/stream_type.cuh"

namespace fftune {

// Multiplies rows `low` and, 8 further, `high` of A by the rows `column` of B: 16 elements of k of
// vectors that lie as above, from pair `pair` on.
template <class Operand>
__device__ __forceinline__ void mma_pairs(float (&sum)[4], const u32* low, const u32* high,
                                          const u32* column, int pair) {
  const u32 a[4] = {low[pair], high[pair], low[pair + 1], high[pair + 1]};
  const u32 b[2] = {column[pair], column[pair + 1]};
  mma_16x8x16<Operand>(sum, a, b);
}

// A weight, which is read once. ptxas moves loads by the read-only path behind the barrier that is
// to keep them before the MMAs, if that saves registers; a volatile load stays.
enum class load_path { read_only, in_order };

template <load_path path>
__device__ __forceinline__ vector16 load_weight(const void* address) {
  if constexpr (path == load_path::read_only) {
    return load_streaming(address);
  } else {
    vector16 value;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]),
                   "=r"(value.word[3])
                 : "l"(address)
                 : "memory");
    return value;
  }
}

// fp8 elements with a scale for each `columns_of_scale` of k: tokens have one in each row, weights
// one for all rows of a warp.
enum class stream_scales { none, block };
constexpr int columns_of_scale = 128;

// Which loads are checked against the end of k: each one, or those of the group in which k ends.
// How the checks are written decides how many registers ptxas takes, so they differ.
enum class stream_bounds { every_load, last_group };

// A warp's MMAs of up to 16 tokens, of type T, with operands * rows rows of weights, of type W.
template <class W, class T, stream_shape shape, load_path path, stream_bounds bounds,
          stream_scales scaled = stream_scales::none>
struct weight_stream {
  using weight = stream_type<W>;
  using token = stream_type<T>;
  using element = typename token::operand;  // the type that the tensor cores multiply
  static constexpr int operands = shape.operands, n_fragments = shape.n_fragments();
  static constexpr int unroll = shape.unroll, halves = shape.halves();
  static constexpr int token_vectors = weight::elements / token::elements;
  static constexpr int k_step = 4 * weight::elements, k_group = k_step * unroll;
  static constexpr int pairs = weight::elements / 2;
  static constexpr bool has_scales = !is_same<typename weight::scale, no_scale>;
  static constexpr bool by_block = scaled == stream_scales::block;
  static_assert(shape.tokens == 8 || shape.tokens == 16);
  static_assert(weight::elements % token::elements == 0 && token::packed == 1);

  using left_type = typename choose_type<bounds == stream_bounds::every_load, int, u32>::type;
  using accumulators = float[operands][n_fragments][4];
  using token_group = vector16[halves][token_vectors];  // of a step

  // A warp's operands for one group of k, which are in flight together.
  struct group {
    vector16 b[operands][n_fragments][unroll];
    token_group a[unroll];
    typename weight::scale b_scale[operands][n_fragments][unroll];
    float b_block_scale[unroll][operands], a_block_scale[unroll][halves];
  };

  // Where this lane reads. Rows past the last one are never stored: the last one is read again.
  const W* weights[operands][n_fragments];
  const void* scales[operands][n_fragments];  // of the rows of weights, if the type has_scales
  const T* rows[halves];                      // of tokens
  bool exists[halves];                        // whether there is such a token
  const float* weight_scales[operands];       // by_block; null: each is 1
  const float* row_scales[halves];
  int k;  // elements of a row; by_block
  accumulators sum = {};
  left_type left;  // elements of k from this lane's pointers on

  // The element of k, after the first of a step, that this lane begins with.
  static __device__ __forceinline__ int lane_k() {
    return static_cast<int>(threadIdx.x) % 4 * weight::elements;
  }

  // Adds the products over [begin, end) of k, `stride` apart: whole groups of k, or to its end.
  // Weights are loaded before the first call of ready(), tokens after it. Pointers are those of the
  // rows' first elements; they move, and each load is checked.
  template <class Ready>
  __device__ __forceinline__ void run(int begin, int end, int stride, const Ready& ready) {
    advance(begin + lane_k());
    left = end - begin - lane_k();
#pragma unroll 1
    for (int at = begin; at < end; at += stride) {
      group of;
      load_weights<true>(of, 0, at);
      ready();
      load_tokens<true>(of, 0, at, [](token_group&, int, bool) {});
      multiply(of);
      advance(stride);
      left -= stride;
    }
  }

  // The same over groups [first, last) of k, `stride` apart, where only the group in which k ends
  // is checked. Pointers are those of this lane's first elements. prepare(tokens, element of k,
  // valid) changes the tokens of a step.
  template <class Ready, class Prepare>
  __device__ __forceinline__ void run_groups(u32 first, u32 last, u32 stride, u32 whole_groups,
                                             const Ready& ready, const Prepare& prepare) {
    group of;
    u32 index = first;
    for (; index < smaller(last, whole_groups); index += stride) {
      load_weights<false>(of, index * k_group, index * k_group);
      ready();
      load_tokens<false>(of, index * k_group, index * k_group, prepare);
      multiply(of);
    }
    if (index < last) {
      load_weights<true>(of, index * k_group, index * k_group);
      ready();
      load_tokens<true>(of, index * k_group, index * k_group, prepare);
      multiply(of);
    }
  }

  // The MMAs of one step of a group.
  static __device__ __forceinline__ void multiply_step(
      accumulators& into, const vector16 (&b)[operands][n_fragments][unroll],
      const typename weight::scale (&b_scale)[operands][n_fragments][unroll], const token_group& a,
      int step) {
    u32 low[pairs], high[pairs] = {};
    expand_tokens(low, a[0]);
    if constexpr (halves == 2) expand_tokens(high, a[halves - 1]);
    if constexpr (shape.order == mma_order::by_fragment) {
#pragma unroll
      for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
        for (int fragment = 0; fragment < n_fragments; ++fragment) {
          u32 column[pairs];
          weight::template expand<element>(b[operand][fragment][step],
                                           b_scale[operand][fragment][step], column);
#pragma unroll
          for (int pair = 0; pair < pairs; pair += 2) {
            mma_pairs<element>(into[operand][fragment], low, high, column, pair);
          }
        }
      }
    } else {
      u32 column[operands][n_fragments][pairs];
#pragma unroll
      for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
        for (int fragment = 0; fragment < n_fragments; ++fragment) {
          weight::template expand<element>(b[operand][fragment][step],
                                           b_scale[operand][fragment][step],
                                           column[operand][fragment]);
        }
      }
#pragma unroll
      for (int pair = 0; pair < pairs; pair += 2) {
#pragma unroll
        for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
          for (int fragment = 0; fragment < n_fragments; ++fragment) {
            mma_pairs<element>(into[operand][fragment], low, high, column[operand][fragment], pair);
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void advance(int elements) {
#pragma unroll
    for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
      for (int fragment = 0; fragment < n_fragments; ++fragment) {
        weights[operand][fragment] += elements / weight::packed;
      }
    }
#pragma unroll
    for (int half = 0; half < halves; ++half) rows[half] += elements;
  }

  // `offset` elements after the pointers, of `left`; `at`: elements of k before this group.
  template <bool checked>
  __device__ __forceinline__ void load_weights(group& to, left_type offset, int at) const {
#pragma unroll
    for (int step = 0; step < unroll; ++step) {
      const left_type from = offset + step * k_step;
      const bool valid = !checked || from < left;
#pragma unroll
      for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
        for (int fragment = 0; fragment < n_fragments; ++fragment) {
          to.b[operand][fragment][step] =
              (bounds == stream_bounds::every_load ? from < left : valid)
                  ? load_weight<path>(weights[operand][fragment] + from / weight::packed)
                  : vector16{};
          if constexpr (has_scales) {
            if (valid)
              to.b_scale[operand][fragment][step].load(scales[operand][fragment],
                                                       at + step * k_step + lane_k());
          }
        }
        if constexpr (by_block) {
          const float* const block_scales = weight_scales[operand];
          to.b_block_scale[step][operand] =
              block_scales != nullptr ? block_scales[block_of(at + step * k_step)] : 1.0f;
        }
      }
    }
  }
  template <bool checked, class Prepare>
  __device__ __forceinline__ void load_tokens(group& to, left_type offset, int at,
                                              const Prepare& prepare) const {
#pragma unroll
    for (int step = 0; step < unroll; ++step) {
      const left_type from = offset + step * k_step;
      const bool valid = !checked || from < left;
#pragma unroll
      for (int half = 0; half < halves; ++half) {
#pragma unroll
        for (int i = 0; i < token_vectors; ++i) {
          to.a[step][half][i] = (bounds == stream_bounds::every_load ? exists[half] && from < left
                                                                     : valid && exists[half])
                                    ? load_dependent(rows[half] + from + i * token::elements)
                                    : vector16{};
        }
        if constexpr (by_block) {
          to.a_block_scale[step][half] =
              exists[half] ? row_scales[half][block_of(at + step * k_step)] : 0.0f;
        }
      }
      prepare(to.a[step], from, valid);
    }
  }
  __device__ __forceinline__ int block_of(int at) const {
    return smaller(at, k - 1) / columns_of_scale;
  }

  __device__ __forceinline__ void multiply(const group& of) {
    __syncwarp();  // or the compiler moves the MMAs up between the loads, to save registers, and
                   // leaves two loads in flight instead of all of them
#pragma unroll
    for (int step = 0; step < unroll; ++step) {
      if constexpr (by_block) {
        accumulators part = {};
        multiply_step(part, of.b, of.b_scale, of.a[step], step);
#pragma unroll
        for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
          for (int i = 0; i < n_fragments * 4; ++i) {
            const int half = i % 4 / 2 < halves ? i % 4 / 2 : 0;
            sum[operand][i / 4][i % 4] +=
                part[operand][i / 4][i % 4] *
                (of.a_block_scale[step][half] * of.b_block_scale[step][operand]);
          }
        }
      } else {
        multiply_step(sum, of.b, of.b_scale, of.a[step], step);
      }
    }
  }
  static __device__ __forceinline__ void expand_tokens(u32 (&pair)[pairs],
                                                       const vector16 (&from)[token_vectors]) {
#pragma unroll
    for (int i = 0; i < token_vectors; ++i) {
      token::template expand<element>(from[i], {}, pair + i * (token::elements / 2));
    }
  }
};

// The accumulators of all warps of a block added up, in their order: through shared memory, as
// [warp][operand][fragment][lane][values]. Warp i then has those of fragment i.
template <stream_shape shape, int warps>
struct warp_reduction {
  static constexpr int operands = shape.operands, n_fragments = shape.n_fragments();
  static constexpr int values = shape.values();
  static constexpr int warp_stride = shape.reduction_bytes(1) / 4;
  static_assert(n_fragments <= warps);

  static __device__ __forceinline__ void store(float* shared,
                                               const float (&sum)[operands][n_fragments][4],
                                               int warp, int lane) {
    float* const own = shared + warp * warp_stride + lane * values;
#pragma unroll
    for (int i = 0; i < operands * n_fragments; ++i) {
#pragma unroll
      for (int value = 0; value < values; ++value) {
        own[i * 32 * values + value] = sum[i / n_fragments][i % n_fragments][value];
      }
    }
  }
  // To `total`, which is zero, in a warp below n_fragments.
  static __device__ __forceinline__ void add(float (&total)[operands][4], const float* shared,
                                             int warp, int lane) {
#pragma unroll
    for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
      for (int other = 0; other < warps; ++other) {
#pragma unroll
        for (int value = 0; value < values; ++value) {
          total[operand][value] +=
              shared[other * warp_stride + (operand * n_fragments + warp) * 32 * values +
                     lane * values + value];
        }
      }
    }
  }
};

}  // namespace fftune
