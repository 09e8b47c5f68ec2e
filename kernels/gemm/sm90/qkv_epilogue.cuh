// The epilogue of a QKV product (qkv_form in gemm/form.cuh) in the sm_90a GEMM. A tile has whole
// heads of one part, and a warpgroup all columns of its rows. The features of a head's row are
// therefore in the four lanes of a quad, and both features of a pair in one of them: bias, norm and
// rotation change the accumulators in place. Then subtiles leave through the epilogue stages: by
// TMA to q, k or v, or as rows of 16-byte stores to their slots of a cache.
#pragma once

#include "common/async.cuh"
#include "gemm/head_row.cuh"
#include "gemm/sm90/epilogue.cuh"

namespace fftune {

template <class Traits>
struct qkv_epilogue : value_epilogue<Traits> {
  using base = value_epilogue<Traits>;
  static constexpr gemm_form form = Traits::form;
  static constexpr sm90_config config = Traits::config;
  static constexpr sm90_plan plan = Traits::plan;
  static constexpr qkv_form of_heads = form.qkv;
  static constexpr int dim = of_heads.dim, rotary = of_heads.rotary;
  static constexpr int heads = config.bn / dim;  // of a tile
  static_assert(config.bn % dim == 0 && dim % 16 == 0 && !config.swap_ab() && plan.reducers == 1);
  static_assert(of_heads.rotation != head_rotation::halves || rotary % 16 == 0);
  static_assert(of_heads.rotation != head_rotation::interleaved || rotary % 8 == 0);
  using T = element_type<form.c>;
  using fragment = typename base::fragment;

  const qkv_params& qkv;

  __device__ __forceinline__ qkv_epilogue(const sm90_params& all, const gemm_params& gemm,
                                          u32 shared, int warpgroup)
      : base(all, gemm, shared, warpgroup), qkv(all.qkv) {
    // The sines and the slots are written by earlier kernels.
    if constexpr (of_heads.rotates() || of_heads.caches) wait_for_dependencies();
  }

  __device__ __forceinline__ void store(fragment& acc, const output_tile& to) {
    if (to.column >= this->gemm.n) return;  // of a cluster that C's last columns do not fill
    const int part = qkv.part_of(to.column);
    const int column = to.column - qkv.first_column(part);
    if constexpr (of_heads.bias) {
      add_bias(acc, of_heads.separate ? part : 0, of_heads.separate ? column : to.column);
    }
    if constexpr (of_heads.normalises || of_heads.rotates()) {
      if (part < 2) {
#pragma unroll
        for (int m64 = 0; m64 < plan.m64_tiles; ++m64) {
          turn_rows(acc[m64][0], to.row + m64 * 64, static_cast<const T*>(qkv.norms[part]));
        }
      }
    }
    const output_tile of_part{to.row, column, 0, part, nullptr, 0, true};
    if constexpr (of_heads.caches) {
      if (part > 0) return store_cached(acc, of_part);
    }
    base::store(acc, of_part);
  }

 private:
  using values = float[base::values];
  static __device__ __forceinline__ int lane() {
    return threadIdx.x % 32;
  }
  // The first of the two neighbouring columns of each eight that a thread has.
  static __device__ __forceinline__ int own_column() {
    return lane() % 4 * 2;
  }
  // Two neighbouring elements.
  static __device__ __forceinline__ void load_pair(const T* from, float& first, float& next) {
    unpack<T>(*reinterpret_cast<const u32*>(from), first, next);
  }

  __device__ __forceinline__ void add_bias(fragment& acc, int tensor, int column) const {
    const T* const bias = static_cast<const T*>(tensor == 0   ? qkv.bias[0]
                                                : tensor == 1 ? qkv.bias[1]
                                                              : qkv.bias[2]) +
                          column + own_column();
#pragma unroll
    for (int eight = 0; eight < config.bn / 8; ++eight) {
      float first, next;
      load_pair(bias + eight * 8, first, next);
#pragma unroll
      for (int m64 = 0; m64 < plan.m64_tiles; ++m64) {
        float* const at = acc[m64][0] + eight * 4;
        at[0] += first, at[1] += next;
        at[2] += first, at[3] += next;
      }
    }
  }

  // The heads of an m64 tile; a thread has two rows of it, eight apart.
  __device__ __forceinline__ void turn_rows(values& acc, int first_row, const T* norm) const {
    if constexpr (of_heads.normalises) {
#pragma unroll
      for (int head = 0; head < heads; ++head) normalise(acc + head * dim / 2, norm + own_column());
    }
    if constexpr (of_heads.rotates()) {
      rotate(acc, first_row + threadIdx.x % 128 / 32 * 16 + lane() / 4);
    }
  }

  __device__ __forceinline__ void normalise(float* own, const T* norm) const {
    float squares[2] = {};
#pragma unroll
    for (int at = 0; at < dim / 2; ++at) squares[at / 2 % 2] += own[at] * own[at];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      squares[row] += __shfl_xor_sync(~0u, squares[row], 1);
      squares[row] += __shfl_xor_sync(~0u, squares[row], 2);
      squares[row] = rsqrtf(squares[row] * (1.0f / dim) + qkv.epsilon);
    }
#pragma unroll
    for (int eight = 0; eight < dim / 8; ++eight) {
      float first, next;
      load_pair(norm + eight * 8, first, next);
      first += qkv.norm_offset, next += qkv.norm_offset;
      float* const at = own + eight * 4;
      at[0] *= squares[0] * first, at[1] *= squares[0] * next;
      at[2] *= squares[1] * first, at[3] *= squares[1] * next;
    }
  }

  static __device__ __forceinline__ void turn(float& first, float& second, float cosine,
                                              float sine) {
    const float before = first;
    first = before * cosine - second * sine;
    second = second * cosine + before * sine;
  }

  // Rows `row` and `row` + 8 of all heads, which share their sines.
  __device__ __forceinline__ void rotate(values& acc, int row) const {
    constexpr bool halves = of_heads.rotation == head_rotation::halves;
    constexpr int steps = rotary / (halves ? 16 : 8), most_in_flight = halves ? 4 : 8;
    const int last = this->gemm.m - 1;
    const float* const sines[2] = {qkv.sines + static_cast<i64>(smaller(row, last)) * rotary,
                                   qkv.sines + static_cast<i64>(smaller(row + 8, last)) * rotary};
#pragma unroll
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (halves) {
          const float4 pairs =
              *reinterpret_cast<const float4*>(sines[i] + (step * 8 + own_column()) * 2);
#pragma unroll
          for (int head = 0; head < heads; ++head) {
            float* const at = acc + head * dim / 2 + step * 4 + i * 2;
            turn(at[0], at[rotary / 4], pairs.x, pairs.y);
            turn(at[1], at[rotary / 4 + 1], pairs.z, pairs.w);
          }
        } else {
          const float2 pair = *reinterpret_cast<const float2*>(sines[i] + step * 8 + own_column());
#pragma unroll
          for (int head = 0; head < heads; ++head) {
            float* const at = acc + head * dim / 2 + step * 4 + i * 2;
            turn(at[0], at[1], pair.x, pair.y);
          }
        }
      }
      // Loads do not pass it: sines in flight take registers beside the accumulators.
      if (step % most_in_flight == most_in_flight - 1) asm volatile("" ::: "memory");
    }
  }

  __device__ __forceinline__ void store_cached(const fragment& acc, const output_tile& to) {
    constexpr int chunks = plan.subtile_n / 8;
    const int thread = threadIdx.x % 128, chunk = thread % chunks;
    T* const cache = static_cast<T*>(to.output == 1 ? this->gemm.c[0][1] : this->gemm.c[1][0]);
#pragma unroll
    for (int subtile = 0; subtile < plan.subtiles; ++subtile) {
      const u32 buffer = this->stages.buffer(this->stages.take());
      if (thread == 0) tma_store_wait_read<config.epilogue_stages - 1>();
      this->sync_warpgroup();
      this->template write<0>(acc, buffer, subtile, thread, 0);
      this->sync_warpgroup();
#pragma unroll 4
      for (int row = thread / chunks; row < plan.subtile_m; row += 128 / chunks) {
        if (to.row + row >= this->gemm.m) break;
        const i64 slot = slot_of<of_heads>(qkv, to.row + row);
        if (slot < 0) continue;
        const int column = to.column + subtile * plan.subtile_n + chunk * 8;
        *reinterpret_cast<float4*>(cache + place_in_part<form>(qkv, to.output, slot, column)) =
            load_shared(buffer + chunk_offset<plan.subtile_n>(row, chunk));
      }
      if (thread == 0) tma_store_commit();  // an empty group: the wait above counts them
    }
  }
};

template <class Traits>
struct epilogue_choice<Traits, epilogue_kind::qkv> {
  using type = qkv_epilogue<Traits>;
};

}  // namespace fftune
