// The epilogue of a gemm_form on one element, shared by all engines: from fp32 accumulators,
// through scales of fp8 and the terms of groups, to the value that is rounded once. Each engine
// loads and stores the elements in its own way.
#pragma once

#include "common/activation.cuh"
#include "common/numerics.cuh"
#include "gemm/form.cuh"

namespace fftune {

// One scale for each 128 elements of a row of A [m, k], and for each block of 128 x 128 of a B
// [n, k]; the last ones may be of less.
constexpr int scale_block = 128;

__device__ __forceinline__ int blocks_of(int extent) {
  return static_cast<int>(ceil_div(static_cast<u32>(extent), static_cast<u32>(scale_block)));
}

// Terms that apply to accumulators of grouped rows before their epilogue: the factor of a row of A,
// then a bias of the row's group for each B operand.
template <gemm_form form>
struct group_terms {
  static constexpr bool present = form.weighs_rows || form.group_bias;
  using wide = element_type<form.wide>;

  // Factor of a row of A, by its place in the sorted order.
  static __device__ __forceinline__ float factor(const gemm_params& p, i64 row) {
    if constexpr (form.weighs_rows) return p.row_weights[row];
    return 1;
  }
  // Bias of one column; 0 past the last one.
  static __device__ __forceinline__ float bias(const gemm_params& p, int group, int operand,
                                               int column) {
    if constexpr (!form.group_bias) {
      return 0;
    } else {
      if (column >= p.n) return 0;
      const u32 first = static_cast<u32>(group) * static_cast<u32>(p.n);
      if constexpr (form.b_operands() == 2 && form.b_packing == packing::halves) {
        return to_float(
            static_cast<const wide*>(p.group_bias[0])[2 * first + operand * p.n + column]);
      } else if constexpr (form.b_operands() == 2 && form.b_packing == packing::interleaved) {
        return to_float(static_cast<const wide*>(p.group_bias[0])[2 * (first + column) + operand]);
      } else {
        const void* const own = operand == 0 ? p.group_bias[0] : p.group_bias[1];
        return to_float(static_cast<const wide*>(own)[first + column]);
      }
    }
  }
};

template <gemm_form form>
struct epilogue_ops {
  static constexpr int b_operands = form.b_operands();
  static constexpr int stored_values = form.stored_values();
  using wide = element_type<form.wide>;
  // Whether C's own scale joins its values: else it joins the accumulators of the last operand,
  // which the epilogue is linear in.
  static constexpr bool scales_c_late =
      stored_values > 1 || form.group_bias || form.activation == activation_kind::swiglu_oai;
  using activation = activation_of<form.activation>;

  // C of the accumulators of each B: themselves, or act(first) * second. The additions of a linear
  // epilogue come afterwards.
  static __device__ __forceinline__ float value(const float (&accumulator)[b_operands]) {
    if constexpr (form.epilogue == epilogue_kind::gated) {
      return gated_product<activation>(accumulator[0], accumulator[1]);
    } else {
      return accumulator[0];
    }
  }
  // Value number `index` that is stored: after C the accumulators themselves, gate and up.
  template <int index>
  static __device__ __forceinline__ float stored(const float (&accumulator)[b_operands]) {
    if constexpr (index == 0) {
      return value(accumulator);
    } else {
      return accumulator[index - 1];
    }
  }

  // Elements of the row broadcasts in two columns, packed where they have 16 bits. Row broadcasts
  // that the form does not have are not loaded.
  struct columns {
    u32 word[row_broadcasts][2] = {};
  };
  using broadcast_rows = const void* const (&)[row_broadcasts];
  // Elements of `column`, which is even, and the next one.
  static __device__ __forceinline__ columns columns_from(broadcast_rows rows, int column) {
    columns result;
    for_each_broadcast([&](auto at) {
      if constexpr (is_f32(row_broadcast(at.value))) {
        const auto* const row = static_cast<const u32*>(rows[at.value]) + column;
        result.word[at.value][0] = row[0], result.word[at.value][1] = row[1];
      } else {
        result.word[at.value][0] =
            *reinterpret_cast<const u32*>(static_cast<const wide*>(rows[at.value]) + column);
      }
    });
    return result;
  }
  // Elements of one column, twice.
  static __device__ __forceinline__ columns column_twice(broadcast_rows rows, int column) {
    columns result;
    for_each_broadcast([&](auto at) {
      if constexpr (is_f32(row_broadcast(at.value))) {
        result.word[at.value][0] = result.word[at.value][1] =
            static_cast<const u32*>(rows[at.value])[column];
      } else {
        result.word[at.value][0] = static_cast<const wide*>(rows[at.value])[column].bits * 0x10001u;
      }
    });
    return result;
  }
  // And the activation behind them, where the form has one.
  static __device__ __forceinline__ void apply_broadcasts(const columns& from, float& first,
                                                          float& next) {
    for_each_broadcast([&](auto at) {
      constexpr row_broadcast which = row_broadcast(at.value);
      float one, other;
      if constexpr (is_f32(which)) {
        one = __uint_as_float(from.word[at.value][0]);
        other = __uint_as_float(from.word[at.value][1]);
      } else {
        unpack<wide>(from.word[at.value][0], one, other);
      }
      first = apply(which, first, one);
      next = apply(which, next, other);
    });
    if constexpr (form.activates) {
      first = activation::value(first);
      next = activation::value(next);
    }
  }
  // One column, of any element type.
  static __device__ __forceinline__ float apply_broadcasts(broadcast_rows rows, i64 column,
                                                           float value) {
    for_each_broadcast([&](auto at) {
      constexpr row_broadcast which = row_broadcast(at.value);
      if constexpr (is_f32(which)) {
        value = apply(which, value, static_cast<const float*>(rows[at.value])[column]);
      } else {
        value = apply(which, value, to_float(static_cast<const wide*>(rows[at.value])[column]));
      }
    });
    if constexpr (form.activates) value = activation::value(value);
    return value;
  }

  // activation_gradient, of the accumulator dc: d_gate, d_up and, where it is stored, hidden.
  static __device__ __forceinline__ void gradient(float dc, float gate, float up,
                                                  float (&result)[stored_values]) {
    float value, slope;
    activation::value_and_slope(gate, value, slope);
    result[0] = activation_gradient<activation>(gate, dc * up, slope);
    result[1] = dc * value;
    if constexpr (stored_values == 3) result[2] = value * up;
  }

  // Where value number `index` of output number `output` goes; `group` where C has one for each.
  static __device__ __forceinline__ void* destination(const gemm_params& p, int index, int output,
                                                      int group = 0) {
    if constexpr (form.epilogue == epilogue_kind::gated) {
      return index == 0 ? p.c[0][0] : index == 1 ? p.gate : p.up;
    } else if constexpr (form.is_gradient()) {
      return index == 0 ? p.c[0][0] : index == 1 ? p.d_up : p.hidden;
    } else if constexpr (form.groups == grouping::reduction && !form.stacked) {
      return group == 0 ? (output == 0 ? p.c[0][0] : p.c[0][1])
                        : (output == 0 ? p.c[1][0] : p.c[1][1]);
    } else {
      return output == 0 ? p.c[0][0] : p.c[0][1];
    }
  }
  // The source that is added to output number `output`.
  static __device__ __forceinline__ const wide* source(const gemm_params& p, int output,
                                                       int group = 0) {
    const void* source;
    if constexpr (form.groups == grouping::reduction && !form.stacked) {
      source = group == 0 ? (output == 0 ? p.source[0][0] : p.source[0][1])
                          : (output == 0 ? p.source[1][0] : p.source[1][1]);
    } else {
      source = output == 0 ? p.source[0][0] : p.source[0][1];
    }
    return static_cast<const wide*>(source);
  }

 private:
  template <int index>
  struct constant {
    static constexpr int value = index;
  };
  // Calls body(constant<i>) for each row broadcast of the form.
  template <int index = 0, class Body>
  static __device__ __forceinline__ void for_each_broadcast(const Body& body) {
    if constexpr (index < row_broadcasts) {
      if constexpr (form.broadcasts[index]) body(constant<index>{});
      for_each_broadcast<index + 1>(body);
    }
  }
};

}  // namespace fftune
