// Results of the persistent form's products, made of their sums: rows of q, k and v, the router's
// logits, gate and up behind their activation, and elements of the residual stream go to all CTAs.
#pragma once

#include "common/activation.cuh"
#include "layer/persistent/product.cuh"

namespace fftune {

template <class T, persistent_config c, class activation>
struct persistent_results {
  using layout = persistent_cta<T, c>;
  using sums = persistent_sums<c>;
  const layout& cta;

  __device__ __forceinline__ void finish_qkv(const persistent_layer_pointers& of, float* to) const {
    const int first = cta.first_row(c.qkv_rows(), c.attention_unit()),
              rows = cta.rows_of_block(c.qkv_rows(), c.attention_unit());
#pragma unroll 1
    for (int at = threadIdx.x; at < rows * c.tokens; at += c.consumers()) {
      const int row = at / c.tokens, column = at % c.tokens, n = first + row;
      float sum = sums::of(cta.shared, row / 16, row % 16, column);
      if constexpr (c.bias) {
        const int part = c.packed_qkv ? 0 : cta.part_of(n);
        sum += to_float(static_cast<const T*>(of.bias[part])[n - cta.first_of(part)]);
      }
      store_relaxed(to + static_cast<i64>(column) * c.qkv_rows() + n, sum);
    }
  }

  // Logits of the router [tokens, experts].
  __device__ __forceinline__ void finish_router(const void* bias, float* to) const {
    const int first = cta.first_row(c.router_rows(), 1),
              rows = cta.rows_of_block(c.router_rows(), 1);
    if (static_cast<int>(threadIdx.x) >= rows * c.tokens) return;
    const int row = threadIdx.x / c.tokens, column = threadIdx.x % c.tokens, n = first + row;
    const bool of_expert = !c.own_gate || n < c.experts;
    float sum = sums::of(cta.shared, 0, row, column);
    if constexpr (c.router_bias) {
      if (of_expert) sum += to_float(static_cast<const T*>(bias)[n]);
    }
    if (c.rounds_logits || !of_expert) sum = to_float(from_float<T>(sum));
    store_relaxed(to + column * c.router_rows() + n, sum);
  }

  // Blocks of 8 rows of gate and 8 of up, or packed tiles of both in turn.
  __device__ __forceinline__ void read_gate_up(int row, int column, float& gate, float& up) const {
    if constexpr (c.packs_network) {
      gate = sums::of(cta.shared, row / 16 * 2, row % 16, column);
      up = sums::of(cta.shared, row / 16 * 2 + 1, row % 16, column);
    } else {
      gate = sums::of(cta.shared, row / 8, row % 8, column);
      up = sums::of(cta.shared, row / 8, row % 8 + 8, column);
    }
  }
  template <class Layer>
  __device__ __forceinline__ void finish_hidden([[maybe_unused]] const Layer& of, T* to) const {
    const int first = cta.first_hidden(), rows = cta.hidden_rows();
    if constexpr (c.has_experts()) {
      // The weight of a choice multiplies what goes into down, which is linear.
#pragma unroll 1
      for (int at = threadIdx.x; at < rows; at += c.consumers()) {
        const int slot = (first + at) / c.h, column = slot / c.of_token();
        const int expert = c.own > 0 || c.expert_bias ? cta.expert_of(slot) : 0;
        const bool in_turn = c.interleaved && (c.own == 0 || expert < layout::all_experts);
        float gate, up;
        if (in_turn) {
          gate = sums::of(cta.shared, at / 8, at % 8 * 2, column);
          up = sums::of(cta.shared, at / 8, at % 8 * 2 + 1, column);
        } else {
          read_gate_up(at, column, gate, up);
        }
        if constexpr (c.expert_bias) {
          if (c.own == 0 || expert < layout::all_experts) {
            const int feature = (first + at) % c.h;
            const i64 row = static_cast<i64>(expert) * c.h + feature;
            const T* const bias = static_cast<const T*>(of.router.gate_bias);
            const i64 gate_at = c.interleaved      ? 2 * row
                                : c.packed_gate_up ? 2 * row - feature
                                                   : row;
            gate += to_float(bias[gate_at]);
            up += to_float(c.interleaved      ? bias[gate_at + 1]
                           : c.packed_gate_up ? bias[gate_at + c.h]
                                              : static_cast<const T*>(of.router.up_bias)[row]);
          }
        }
        store_relaxed(to + first + at,
                      from_float<T>(gated_product<activation>(gate, up) *
                                    read_float(cta.shared + c.weights_at() + slot * 4)));
      }
      return;
    }
#pragma unroll 1
    for (int at = threadIdx.x; at < rows * c.tokens; at += c.consumers()) {
      const int row = at / c.tokens, column = at % c.tokens;
      float gate, up;
      read_gate_up(row, column, gate, up);
      store_relaxed(to + static_cast<i64>(column) * c.h + first + row,
                    from_float<T>(gated_product<activation>(gate, up)));
    }
  }

  // Each thread has one element of the residual stream at most. bias(feature, token) is added, and
  // with ranks the summands of the peers before it; `scale` multiplies all of this. With post-norms
  // the sum alone is stored.
  template <class Bias, class Group>
  __device__ __forceinline__ void finish_residual(float& residual, T* to, int unit, bool plain,
                                                  const Bias& bias, const float* scale,
                                                  [[maybe_unused]] Group& group) const {
    const int row = threadIdx.x / c.tokens, column = threadIdx.x % c.tokens;
    if (row >= cta.rows_of_block(c.d, unit)) return;
    const int feature = cta.first_row(c.d, unit) + row;
    const i64 place = static_cast<i64>(column) * c.d + feature;
    float sum = sums::of(cta.shared, row / 16, row % 16, column);
    if constexpr (c.ranks > 0) sum = group.sum_of_ranks(sum, place);
    sum += bias(feature, column);
    if constexpr (c.scales_residual) sum *= scale[feature];
    const T result = from_float<T>(residual + sum);
    if constexpr (!c.post_norms) residual = to_float(result);
    T* const at = to + place;
    if (plain)
      *at = result;
    else
      store_relaxed(at, result);
  }

  // The element of the residual stream `from` [tokens, d] that finish_residual() adds to, where the
  // thread had another one before. persistent_input::load() has waited for all of them already.
  __device__ __forceinline__ float residual_of(const T* from, int unit) const {
    const int row = threadIdx.x / c.tokens, column = threadIdx.x % c.tokens;
    if (row >= cta.rows_of_block(c.d, unit)) return 0;
    from += static_cast<i64>(column) * c.d + cta.first_row(c.d, unit) + row;
    T word;
    int spins = 0;
    do {
      word.bits = load_relaxed_half(from);
      count_spin(spins);
    } while (word.bits == 0);
    word.bits = static_cast<u16>(~word.bits);
    return to_float(word);
  }

  // The sum of the experts' biases behind down, each times its weight.
  __device__ __forceinline__ float expert_bias(const void* bias, int feature, int token) const {
    float sum = 0;
#pragma unroll 1
    for (int i = 0; i < c.choices + c.shared; ++i) {
      const int slot = token * c.of_token() + i;
      sum += read_float(cta.shared + c.weights_at() + slot * 4) *
             to_float(static_cast<const T*>(
                 bias)[static_cast<i64>(cta.expert_of(slot)) * c.d + feature]);
    }
    return sum;
  }
};

}  // namespace fftune
