// Activations of the persistent form's products: polled words of other CTAs, which become rows of
// T in shared memory and go through the norm in front of the product. With norms behind the parts
// the residual stream is here too.
#pragma once

#include "common/rows.cuh"
#include "layer/persistent/cta.cuh"

namespace fftune {

template <class T, persistent_config c, class norm>
struct persistent_input {
  using layout = persistent_cta<T, c>;
  const layout& cta;

  // Starts to copy the weights of a norm for load(), and of the post-norm before it.
  __device__ __forceinline__ void fetch_norms(const void* weights, const void* post) const {
    const auto fetch = [&](int to, const void* from) {
#pragma unroll 1
      for (int at = threadIdx.x; at < c.d / 8; at += c.consumers())
        copy_async(cta.shared + to + at * 16, static_cast<const u8*>(from) + at * 16, true);
    };
    if (weights != nullptr) fetch(c.norm_at(), weights);
    if (c.post_norms && post != nullptr) fetch(c.post_norm_at(), post);
    copy_async_commit();
  }

  // A token's root mean square from what each of its threads has of it, reciprocal. All MMA warps.
  template <int lanes, int count>
  __device__ __forceinline__ float deviation_of(const vector16 (&value)[count], int vectors) const {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (i * lanes >= vectors) continue;
#pragma unroll
      for (const u32 word : value[i].word) {
        float first, second;
        unpack<T>(word, first, second);
        squares += first * first + second * second;
      }
    }
    __syncwarp();
    squares = warp_total(squares);
    const u32 statistics = cta.shared + c.statistics_at();
    if (threadIdx.x % 32 == 0) write_value(statistics + threadIdx.x / 32 * 4, squares);
    copy_async_wait<0>();  // the norm's weights
    cta.sync_consumers();
    constexpr int warps_of_token = lanes / 32;
    const int row = threadIdx.x / lanes;
    float sum = 0;
    if (row < c.tokens) {
#pragma unroll
      for (int i = 0; i < warps_of_token; ++i)
        sum += read_value<float>(statistics + (row * warps_of_token + i) * 4);
    }
    return reciprocal_deviation(sum, c.d, cta.p.epsilon);
  }
  static __device__ __forceinline__ void normalise(vector16& value, float r,
                                                   const vector16& weight) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      float first, second, first_weight, second_weight;
      unpack<T>(value.word[word], first, second);
      unpack<T>(weight.word[word], first_weight, second_weight);
      first *= r, second *= r;
      // Both in one instruction, where normalised() rounds to T.
      if constexpr (is_same<norm, llama_norm>) unpack<T>(pack<T>(first, second), first, second);
      value.word[word] =
          pack<T>(first * norm::factor(first_weight), second * norm::factor(second_weight));
    }
  }

  static constexpr int lanes = c.consumers() / layout::token_places;  // of a token
  // A thread's vectors of a part of the activations, as they are exchanged. The dense products
  // beside packed experts have few activations, and fewer vectors are less code.
  static constexpr int vectors_of(bool packs) {
    const int longest = larger(c.d, c.q_rows());
    const bool is_short = !packs && c.packs_network && !c.packs_attention && c.has_experts();
    return ceil_div((is_short ? longest : c.input_length()) / 8, lanes);
  }

  // Asks for elements `begin` to `end` of the rows of `from` [tokens, k], for load() later.
  template <int each>
  __device__ __forceinline__ void request(vector16 (&value)[each], const T* from, int k, int begin,
                                          int end) const {
    const int row = threadIdx.x / lanes, place = threadIdx.x % lanes;
    const int vectors = row < c.tokens ? (end - begin) / 8 - place : 0;
    const T* const at = from + static_cast<i64>(row) * k + begin + place * 8;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      value[i] = {~0u, ~0u, ~0u, ~0u};
      if (i * lanes < vectors) value[i] = load_relaxed(at + i * lanes * 8);
    }
  }

  // Elements `begin` to `end` of the rows of `from` [tokens, k] to shared memory, normalised on the
  // way or not. Unless they are plain, they are waited for. `requested`: request() has been called.
  // With `ends` they go to y instead.
  template <int each>
  __device__ __forceinline__ void load(vector16 (&value)[each], bool requested, const T* from,
                                       int k, int begin, int end, bool normalises, bool plain,
                                       bool ends = false) const {
    const int row = threadIdx.x / lanes, place = threadIdx.x % lanes;
    const int vectors = row < c.tokens ? (end - begin) / 8 - place : 0;
    const T* row_at_x = from + static_cast<i64>(row) * k;
    if constexpr (c.has_head()) {
      if (plain && row < c.tokens) row_at_x = cta.row_of_x(row);
    }
    const T* const at = row_at_x + begin + place * 8;
    if (!requested) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        value[i] = {~0u, ~0u, ~0u, ~0u};
        if (i * lanes < vectors) value[i] = {};
      }
    }
    int spins = 0;
    bool missing;
    do {
#pragma unroll
      for (int i = 0; i < each; ++i)
        if (i * lanes < vectors && is_missing(value[i]) && (!c.has_head() || row_at_x != nullptr))
          value[i] = load_relaxed(at + i * lanes * 8);
      missing = false;
#pragma unroll
      for (int i = 0; i < each; ++i) missing = missing || is_missing(value[i]);
      count_spin(spins);
    } while (missing && !plain);
    __syncwarp();
    if (!plain) {
#pragma unroll
      for (int i = 0; i < each; ++i) value[i] = complement(value[i]);
    } else if constexpr (c.has_head()) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        if (i * lanes >= vectors) continue;
#pragma unroll
        for (u32& word : value[i].word) {
          float first, second;
          unpack<T>(word, first, second);
          word = pack<T>(first * cta.p.token.embed_scale, second * cta.p.token.embed_scale);
        }
      }
    }
    if constexpr (c.post_norms) {
      if (normalises) add_to_residual<lanes>(value, row, place, vectors, plain);
      if (ends) {
#pragma unroll
        for (int i = 0; i < each; ++i)
          if (i * lanes < vectors && (place + i * lanes) % c.blocks == static_cast<int>(blockIdx.x))
            store(static_cast<T*>(cta.p.y) + static_cast<i64>(row) * k + (place + i * lanes) * 8,
                  value[i]);
        return;
      }
    }
    float r = 0;
    if (normalises) r = deviation_of<lanes>(value, vectors);
#pragma unroll
    for (int i = 0; i < each; ++i) {
      if (i * lanes >= vectors) continue;
      const u32 at = (place + i * lanes) * 16;
      if (normalises) normalise(value[i], r, read_shared(cta.shared + c.norm_at() + at));
      write_shared(cta.shared + c.input_at() + row * c.input_stride() + at, value[i]);
    }
    cta.sync_consumers();
  }

  // With post-norms: the residual stream, which becomes x or is added to. A thread has the same
  // elements of it each time.
  template <int lanes, int count>
  __device__ __forceinline__ void add_to_residual(vector16 (&value)[count], int row, int place,
                                                  int vectors, bool begins) const {
    const u32 residual = cta.shared + c.residual_at() + row * c.residual_stride();
    if (!begins) {
      const float r = deviation_of<lanes>(value, vectors);
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (i * lanes >= vectors) continue;
        const u32 at = (place + i * lanes) * 16;
        normalise(value[i], r, read_shared(cta.shared + c.post_norm_at() + at));
        const vector16 before = read_shared(residual + at);
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          float first, second, first_before, second_before;
          unpack<T>(value[i].word[word], first, second);
          unpack<T>(before.word[word], first_before, second_before);
          value[i].word[word] = pack<T>(first + first_before, second + second_before);
        }
      }
      cta.sync_consumers();  // the statistics are read
    }
#pragma unroll
    for (int i = 0; i < count; ++i)
      if (i * lanes < vectors) write_shared(residual + (place + i * lanes) * 16, value[i]);
  }
};

}  // namespace fftune
