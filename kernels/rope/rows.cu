// Computes y_i = m (x_i cos f_i ± x_p sin f_p or f_i) for the features of a head, where p is the
// partner of i. Each byte of q and k is read and written once, and a block reuses its sines for all
// its heads.
//
// q, k, q_out, k_out [tokens, heads, dim], tokens of q and k q_row and k_row elements apart;
// `strided`: q_outer, k_outer, q_head and k_head are the strides of the outer dimension and of
// heads; angle_table [positions, rotary], offsets [sequences + 1], starts [sequences]. A row, one
// head of one token, is shared by row_lanes threads. Each has two accesses of `vector` bytes, which
// are rotated with each other (halves), each within itself (interleaved), or copied (beyond
// `rotary`). A block has `tokens` tokens and `heads` rows of each at a time; a thread takes every
// `heads`-th head of its token, `unroll` at once, in `passes` passes, the heads of q before those
// of k. A row is in registers before any of it is written, so q_out and k_out may be q and k. Grid:
// ceil(tokens / tokens of a block) * head_blocks. Block: row_lanes * heads * tokens.
#include "common/async.cuh"
#include "common/bisect.cuh"
#include "common/numerics.cuh"
#include "common/vectors.cuh"

namespace fftune {

struct rope_layout {
  static constexpr int sbhd = 0, bshd = 1, thd = 2;
};

// An array passed by value: the frequencies of the pairs.
template <int count>
struct float_array {
  float value[count];
};

// The type of the arithmetic: float64 for f32, so that results are rounded once.
template <class T>
struct rope_arithmetic {
  using type = float;
};
template <>
struct rope_arithmetic<float> {
  using type = double;
};

// How a row is shared.
template <class T, int dim, int rotary, int vector>
struct rope_row {
  static constexpr int count = vector / static_cast<int>(sizeof(T));
  static constexpr int rotating_lanes = rotary / 2 / count;
  static constexpr int copies = (dim - rotary) / count;  // accesses beyond the rotated part
  static constexpr int lanes = rotating_lanes + (copies + 1) / 2;
};

// A 64-bit division takes many instructions, and few problems need it.
__device__ __forceinline__ int quotient(i64 value, int divisor) {
  if (value >> 32 == 0)
    return static_cast<int>(static_cast<u32>(value) / static_cast<u32>(divisor));
  return static_cast<int>(value / divisor);
}

// The position of a token: its index in its sequence plus, with `starts`, the sequence's first
// position. `length`: tokens of a sequence, unused in thd.
template <int layout, bool starts>
__device__ __forceinline__ int position_of(i64 token, int sequences, int length, const int* offsets,
                                           const int* first) {
  int sequence, position;
  if constexpr (layout == rope_layout::sbhd) {
    position = quotient(token, sequences);
    sequence = static_cast<int>(token - static_cast<i64>(position) * sequences);
  } else if constexpr (layout == rope_layout::bshd) {
    sequence = quotient(token, length);
    position = static_cast<int>(token - static_cast<i64>(sequence) * length);
  } else {
    sequence = last_before(sequences, [&](int i) { return offsets[i] <= token; });
    position = static_cast<int>(token) - offsets[sequence];
  }
  if constexpr (starts) position += first[sequence];
  return position;
}

// Loads neighbouring elements from shared memory in the widest accesses that alignment allows.
template <int count, class Real>
__device__ __forceinline__ void load_run(const Real* from, Real* to) {
  constexpr int bytes = count * static_cast<int>(sizeof(Real));
  struct alignas(bytes < 16 ? bytes : 16) elements {
    Real value[count];
  };
  const elements run = *reinterpret_cast<const elements*>(from);
#pragma unroll
  for (int i = 0; i < count; ++i) to[i] = run.value[i];
}

// Rotates a pair of elements; `transposed`: the backward pass.
template <bool transposed, class Real>
__device__ __forceinline__ void rotate(float& first, float& second, Real first_sine,
                                       Real first_cosine, Real second_sine, Real second_cosine) {
  const Real a = first, b = second;
  if constexpr (transposed) {
    first = static_cast<float>(a * first_cosine + b * second_sine);
    second = static_cast<float>(b * second_cosine - a * first_sine);
  } else {
    first = static_cast<float>(a * first_cosine - b * first_sine);
    second = static_cast<float>(b * second_cosine + a * second_sine);
  }
}

// The sines and cosines of a block's angles, `of_token` of each token from `first_token` on. A
// thread's angles are loaded in batches.
template <int of_token, int threads, class Real, int all, class AngleOf>
__device__ __forceinline__ void keep_sines(Real (&sines)[all], Real (&cosines)[all],
                                           i64 first_token, i64 token_count, float scale,
                                           const AngleOf& angle_of) {
  const auto keep = [&](int i, float angle) {
    Real sine, cosine;
    sine_and_cosine(angle, sine, cosine);
    sines[i] = sine * scale;
    cosines[i] = cosine * scale;
  };
  constexpr int of_thread = ceil_div(all, threads), batch = of_thread < 4 ? of_thread : 4;
  const int thread = static_cast<int>(threadIdx.x);
  for (int start = thread; start < all; start += batch * threads) {
    if constexpr (batch == 1) {
      const i64 of = first_token + start / of_token;
      if (of >= token_count) break;
      keep(start, angle_of(of, start % of_token));
    } else {
      float angle[batch];
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        const int i = start + b * threads;
        const i64 of = first_token + i / of_token;
        angle[b] = i < all && of < token_count ? angle_of(of, i % of_token) : 0.0f;
      }
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        const int i = start + b * threads;
        if (i < all) keep(i, angle[b]);
      }
    }
  }
}

// Rotates the pairs of a head in a thread's two accesses.
template <bool transposed, bool interleaved, bool table, class T, int count, class Real, int angles>
__device__ __forceinline__ void rotate_vectors(aligned_vector<T, count> (&vectors)[2],
                                               const Real (&sine)[angles],
                                               const Real (&cosine)[angles]) {
  float value[2 * count], part[2][count];
  to_floats(vectors[0], part[0]);
  to_floats(vectors[1], part[1]);
#pragma unroll
  for (int e = 0; e < 2 * count; ++e) value[e] = part[e / count][e % count];
#pragma unroll
  for (int p = 0; p < count; ++p) {
    const int first = interleaved ? 2 * p : p;
    const int second = interleaved ? 2 * p + 1 : p + count;
    rotate<transposed>(value[first], value[second], sine[table ? first : p],
                       cosine[table ? first : p], sine[table ? second : p],
                       cosine[table ? second : p]);
  }
#pragma unroll
  for (int e = 0; e < 2 * count; ++e) part[e / count][e % count] = value[e];
  vectors[0] = from_floats<T>(part[0]);
  vectors[1] = from_floats<T>(part[1]);
}

// The offset of a head's first feature. `inner`: tokens of an outer block, of strided tensors.
template <int layout, bool strided, int dim>
__device__ __forceinline__ i64 head_offset(i64 token, int head, int inner, i64 row, i64 outer,
                                           i64 head_stride) {
  if constexpr (!strided) return token * row + static_cast<i64>(head) * dim;
  const i64 in_token = head * head_stride;
  if constexpr (layout == rope_layout::thd) return token * row + in_token;
  const i64 block = quotient(token, inner);
  return block * outer + (token - block * inner) * row + in_token;
}

template <class T, int layout, bool strided, bool starts, bool table, bool transposed,
          bool interleaved, int dim, int rotary, int vector, int heads, int tokens, int unroll,
          int passes, bool evict_first>
__global__ void __launch_bounds__(rope_row<T, dim, rotary, vector>::lanes* heads* tokens)
    rope_rows(const T* q, const T* k, T* q_out, T* k_out, const float* angle_table,
              const int* offsets, const int* first_positions, float_array<rotary / 2> frequencies,
              i64 token_count, int sequences, int length, int positions, int q_heads, int k_heads,
              i64 q_row, i64 k_row, i64 q_outer, i64 k_outer, i64 q_head, i64 k_head,
              int head_blocks, float scale) {
  using Real = typename rope_arithmetic<T>::type;
  using row_of = rope_row<T, dim, rotary, vector>;
  constexpr int count = row_of::count;
  constexpr int rotating_lanes = row_of::rotating_lanes;
  constexpr int row_lanes = row_of::lanes;
  constexpr int kinds = table ? 2 : 1;  // angles of a pair: a table has one for each feature
  constexpr int angles = table ? rotary : rotary / 2;  // of a token
  // Interleaved pairs are within one access, except where an access is one element.
  constexpr bool adjacent = interleaved && count == 1;
  wait_and_launch_dependents();

  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % row_lanes;
  const int head_in_block = thread / row_lanes % heads;
  const u32 across = static_cast<u32>(head_blocks);
  const i64 first_token = static_cast<i64>(blockIdx.x / across) * tokens;
  const int token_in_block = thread / (row_lanes * heads);
  const i64 token = first_token + token_in_block;
  const int first_head =
      static_cast<int>(blockIdx.x % across) * (heads * unroll * passes) + head_in_block;
  const bool rotates = row_of::copies == 0 || lane < rotating_lanes;
  const int first_column =
      rotates ? lane * count * (adjacent ? 2 : 1) : rotary + (lane - rotating_lanes) * 2 * count;
  const int second_column = rotates && !adjacent ? first_column + rotary / 2 : first_column + count;
  const bool has_second = rotates || second_column < dim;
  const u64 policy = l2_eviction_policy<evict_first>();

  const auto place_of = [&](i64 row, i64 outer, i64 head_stride, int head) {
    return head_offset<layout, strided, dim>(
        token, head, layout == rope_layout::sbhd ? sequences : length, row, outer, head_stride);
  };
  aligned_vector<T, count> values[unroll][2];
  const auto load = [&](int pass) {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const int head = first_head + (pass * unroll + u) * heads;
      const bool valid = token < token_count && head < q_heads + k_heads;
      const T* const row = head < q_heads ? q + place_of(q_row, q_outer, q_head, head)
                                          : k + place_of(k_row, k_outer, k_head, head - q_heads);
      values[u][0] = load_once<T, count>(row + first_column, valid, policy);
      values[u][1] = load_once<T, count>(row + second_column, valid && has_second, policy);
    }
  };
  load(0);

  // While those loads are in flight, the sines of the block's tokens, each by one thread; a
  // thread's loads of angles are batched.
  constexpr int threads = row_lanes * heads * tokens;
  alignas(16) __shared__ Real sines[tokens * angles], cosines[tokens * angles];
  const auto angle_of = [&](i64 of, int feature) {
    const int position =
        position_of<layout, starts>(of, sequences, length, offsets, first_positions);
    if constexpr (table) {
      const int row = position < 0 ? 0 : position < positions ? position : positions - 1;
      return angle_table[static_cast<i64>(row) * rotary + feature];
    } else {
      return __fmul_rn(static_cast<float>(position), frequencies.value[feature]);
    }
  };
  keep_sines<angles, threads>(sines, cosines, first_token, token_count, scale, angle_of);
  __syncthreads();

  // The sines of the thread's pairs: per feature with a table, in the order of its two accesses,
  // else per pair.
  constexpr int run = !table && interleaved && count > 1 ? count / 2 : count;
  Real sine[kinds * count], cosine[kinds * count];
  if (rotates) {
#pragma unroll
    for (int e = 0; e < kinds * count; e += run) {
      const int column = e == 0 ? first_column : second_column;
      const int place = token_in_block * angles + (!table && interleaved ? column / 2 : column);
      load_run<run>(sines + place, sine + e);
      load_run<run>(cosines + place, cosine + e);
    }
  }

#pragma unroll 1
  for (int pass = 0;;) {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const int head = first_head + (pass * unroll + u) * heads;
      if (token >= token_count || head >= q_heads + k_heads) break;
      T* const row = head < q_heads ? q_out + (token * q_heads + head) * dim
                                    : k_out + (token * k_heads + head - q_heads) * dim;
      if (rotates) rotate_vectors<transposed, interleaved, table>(values[u], sine, cosine);
      store_once(row + first_column, values[u][0], policy);
      if (has_second) store_once(row + second_column, values[u][1], policy);
    }
    if (++pass == passes) return;
    load(pass);
  }
}

}  // namespace fftune
