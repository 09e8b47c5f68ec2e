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
  // Biases of this thread's results of a product. They are loaded before the product waits for its
  // activations: none is in L2, and a load queues behind the copies of weights.
  struct biases {
    u32 bits[c.own_biases()] = {};

    __device__ __forceinline__ void load(int i, const void* of, i64 at) {
      bits[i] = load_ahead(static_cast<const T*>(of) + at);
    }
    __device__ __forceinline__ float operator[](int i) const { return half_of<T>(bits[i]); }
  };

  __device__ __forceinline__ void load_qkv_biases(biases& bias,
                                                  const persistent_layer_pointers& of) const {
    const int first = cta.first_row(c.qkv_rows(), c.attention_unit()),
              rows = cta.rows_of_block(c.qkv_rows(), c.attention_unit());
#pragma unroll
    for (int i = 0; i < c.own_qkv(); ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * c.consumers();
      const int n = first + at / c.tokens, part = c.packed_qkv ? 0 : cta.part_of(n);
      if (at < rows * c.tokens) bias.load(i, of.bias[part], n - cta.first_of(part));
    }
  }
  __device__ __forceinline__ void finish_qkv(const biases& bias, float* to) const {
    const int first = cta.first_row(c.qkv_rows(), c.attention_unit()),
              rows = cta.rows_of_block(c.qkv_rows(), c.attention_unit());
#pragma unroll
    for (int i = 0; i < c.own_qkv(); ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * c.consumers();
      if (at >= rows * c.tokens) break;
      const int row = at / c.tokens, column = at % c.tokens;
      float sum = sums::of(cta.shared, row / 16, row % 16, column);
      if constexpr (c.bias) sum += bias[i];
      store_relaxed(to + static_cast<i64>(column) * c.qkv_rows() + first + row, sum);
    }
  }

  __device__ __forceinline__ void load_router_bias(biases& bias, const void* of) const {
    const int row = threadIdx.x / c.tokens;
    if (row < cta.rows_of_block(c.router_rows(), 1) &&
        (!c.own_gate || cta.first_row(c.router_rows(), 1) + row < c.experts))
      bias.load(0, of, cta.first_row(c.router_rows(), 1) + row);
  }
  // Logits of the router [tokens, experts].
  __device__ __forceinline__ void finish_router(const biases& bias, float* to) const {
    const int first = cta.first_row(c.router_rows(), 1),
              rows = cta.rows_of_block(c.router_rows(), 1);
    if (static_cast<int>(threadIdx.x) >= rows * c.tokens) return;
    const int row = threadIdx.x / c.tokens, column = threadIdx.x % c.tokens, n = first + row;
    const bool of_expert = !c.own_gate || n < c.experts;
    float sum = sums::of(cta.shared, 0, row, column);
    if constexpr (c.router_bias) {
      if (of_expert) sum += bias[0];
    }
    if (c.rounds_logits || !of_expert) sum = to_float(from_float<T>(sum));
    store_relaxed(to + column * c.router_rows() + n, sum);
  }

  // Blocks of 8 rows of gate and 8 of up, or packed tiles of both in turn. `handed`: of the rows of
  // up that are another CTA's.
  __device__ __forceinline__ void read_gate_up(int row, int column,
                                               [[maybe_unused]] const float* handed, float& gate,
                                               float& up) const {
    if constexpr (c.packs_network) {
      const int block = row / 16 * 2 + (cta.begins_with_up() ? 1 : 0);
      gate = sums::of(cta.shared, block, row % 16, column);
      if (c.shares_pairs() && cta.first_gate_up() + block + 1 == cta.end_gate_up())
        up = wait_for_float(handed + cta.first_hidden() + row);
      else
        up = sums::of(cta.shared, block + 1, row % 16, column);
    } else {
      gate = sums::of(cta.shared, row / 8, row % 8, column);
      up = sums::of(cta.shared, row / 8, row % 8 + 8, column);
    }
  }
  // Loads those of gate and up in turn. The producer has chosen the experts.
  __device__ __forceinline__ void load_hidden_biases(biases& bias,
                                                     const persistent_router_pointers& of) const {
    const int first = cta.first_hidden(), rows = cta.hidden_rows();
#pragma unroll
    for (int i = 0; i < c.own_hidden(); ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * c.consumers();
      if (at >= rows) break;
      const int feature = (first + at) % c.h, expert = cta.expert_of((first + at) / c.h);
      if (c.own > 0 && expert >= layout::all_experts) continue;
      const i64 row = static_cast<i64>(expert) * c.h + feature;
      const i64 gate_at = c.interleaved ? 2 * row : c.packed_gate_up ? 2 * row - feature : row;
      bias.load(2 * i, of.gate_bias, gate_at);
      if constexpr (c.interleaved || c.packed_gate_up)
        bias.load(2 * i + 1, of.gate_bias, gate_at + (c.interleaved ? 1 : c.h));
      else
        bias.load(2 * i + 1, of.up_bias, row);
    }
  }
  __device__ __forceinline__ void finish_hidden(const biases& bias, const float* handed,
                                                T* to) const {
    const int first = cta.first_hidden(), rows = cta.hidden_rows();
    if constexpr (c.has_experts()) {
      // The weight of a choice multiplies what goes into down, which is linear.
#pragma unroll(c.expert_bias ? c.own_hidden() : 1)
      for (int i = 0; i < c.own_hidden(); ++i) {
        const int at = static_cast<int>(threadIdx.x) + i * c.consumers();
        if (at >= rows) break;
        const int slot = (first + at) / c.h, column = slot / c.of_token();
        const int expert = c.own > 0 || c.expert_bias ? cta.expert_of(slot) : 0;
        const bool in_turn = c.interleaved && (c.own == 0 || expert < layout::all_experts);
        float gate, up;
        if (in_turn) {
          gate = sums::of(cta.shared, at / 8, at % 8 * 2, column);
          up = sums::of(cta.shared, at / 8, at % 8 * 2 + 1, column);
        } else {
          read_gate_up(at, column, handed, gate, up);
        }
        if constexpr (c.expert_bias) {
          if (c.own == 0 || expert < layout::all_experts) {
            gate += bias[2 * i];
            up += bias[2 * i + 1];
          }
        }
        store_relaxed(to + first + at,
                      from_float<T>(gated_product<activation>(gate, up) *
                                    read_value<float>(cta.shared + c.weights_at() + slot * 4)));
      }
      return;
    }
#pragma unroll 1
    for (int at = threadIdx.x; at < rows * c.tokens; at += c.consumers()) {
      const int row = at / c.tokens, column = at % c.tokens;
      float gate, up;
      read_gate_up(row, column, handed, gate, up);
      store_relaxed(to + static_cast<i64>(column) * c.h + first + row,
                    from_float<T>(gated_product<activation>(gate, up)));
    }
  }

  // Loads the terms of this thread's element of the residual stream: a bias behind attention, and
  // behind down those of the experts.
  __device__ __forceinline__ void load_out_bias(biases& bias, const void* of) const {
    const int row = threadIdx.x / c.tokens;
    if (row < cta.residual_rows(false)) bias.load(0, of, cta.first_residual(false) + row);
  }
  __device__ __forceinline__ void load_down_biases(biases& bias, const void* of) const {
    const int row = threadIdx.x / c.tokens, column = threadIdx.x % c.tokens;
    if (row >= cta.down_rows()) return;
#pragma unroll
    for (int i = 0; i < c.choices + c.shared; ++i)
      bias.load(i, of,
                static_cast<i64>(cta.expert_of(column * c.of_token() + i)) * c.d +
                    cta.first_down() + row);
  }
  // The sum of the experts' biases, each times its weight.
  __device__ __forceinline__ float down_bias(const biases& bias, int token) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < c.choices + c.shared; ++i)
      sum +=
          read_value<float>(cta.shared + c.weights_at() + (token * c.of_token() + i) * 4) * bias[i];
    return sum;
  }

  // Each thread has one element of the residual stream at most. The biases are added, and with
  // ranks the summands of the peers before them; `scale` multiplies all of this. With post-norms
  // the sum alone is stored. `handed`: where the next CTA has stored its sums of the last tile.
  template <class Group>
  __device__ __forceinline__ void finish_residual(float& residual, T* to, bool is_down, bool plain,
                                                  const biases& bias, const float* scale,
                                                  [[maybe_unused]] const float* handed,
                                                  [[maybe_unused]] Group& group) const {
    const int row = threadIdx.x / c.tokens, column = threadIdx.x % c.tokens;
    if (row >= cta.residual_rows(is_down)) return;
    const int feature = cta.first_residual(is_down) + row;
    const i64 place = static_cast<i64>(column) * c.d + feature;
    int block = row / 16;
    if (is_down && cta.parts_before() > 0) ++block;
    float sum = sums::of(cta.shared, block, row % 16, column);
    if constexpr (c.shares_tiles()) {
      const int end = (feature / packed_rows + 1) * c.slots();
      if (is_down && end > cta.end_down_part()) sum += wait_for_float(handed + feature);
    }
    if constexpr (c.ranks > 0) sum = group.sum_of_ranks(sum, place);
    if (c.out_bias && !is_down) sum += bias[0];
    if (c.expert_bias && is_down) sum += down_bias(bias, column);
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
  __device__ __forceinline__ float residual_of(const T* from, bool is_down) const {
    const int row = threadIdx.x / c.tokens, column = threadIdx.x % c.tokens;
    if (row >= cta.residual_rows(is_down)) return 0;
    from += static_cast<i64>(column) * c.d + cta.first_residual(is_down) + row;
    T word;
    int spins = 0;
    do {
      word.bits = load_relaxed_half(from);
      count_spin(spins);
    } while (word.bits == 0);
    word.bits = static_cast<u16>(~word.bits);
    return to_float(word);
  }
};

}  // namespace fftune
