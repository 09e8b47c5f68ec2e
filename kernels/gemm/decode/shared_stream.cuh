// A stream of weights (gemm/decode/stream.cuh) through a pipeline of stages in shared memory, which
// one warp of a CTA fills while the others run the MMAs. Weights are the 16 rows of A, and up to 8
// tokens the columns of B.
//
//   producer warp   waits for the stage's `empty` barrier, and until fewer than most_in_flight
//                   stages are being copied; a bulk copy for each row -> `full`
//   shared memory   barriers: full [stages], empty [stages]; then the stages of up to 16 rows
//   MMA warps       wait for `full`; each takes a part of the stage's k; one lane of each arrives
//                   at `empty`
#pragma once

#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/vectors.cuh"
#include "gemm/decode/stream.cuh"

namespace fftune {

// With FFTUNE_BOUND_SPINS a wait that does not end traps, instead of hanging the device.
__device__ __forceinline__ void count_spin([[maybe_unused]] int& spins) {
#ifdef FFTUNE_BOUND_SPINS
  if (++spins > 1 << 20) __trap();
#endif
}

__device__ __forceinline__ void wait_for_stage(u32 barrier, u32 parity) {
  int spins = 0;
  u32 done = 0;
  while (!done) {
    asm volatile(
        "{.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    count_spin(spins);
  }
}

__device__ __forceinline__ void bulk_load(u32 shared, const void* global, u32 bytes, u32 barrier,
                                          l2_policy policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(static_cast<u64>(policy))
      : "memory");
}

__device__ __forceinline__ vector16 read_shared(u32 address) {
  vector16 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "r"(address));
  return value;
}

__device__ __forceinline__ void write_shared(u32 address, const vector16& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.word[0]),
               "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
               : "memory");
}

// A value of 2, 4 or 8 bytes.
template <class Value>
__device__ __forceinline__ Value read_value(u32 address) {
  if constexpr (sizeof(Value) == 8) {
    u64 bits;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(bits) : "r"(address));
    return __builtin_bit_cast(Value, bits);
  } else if constexpr (sizeof(Value) == 4) {
    u32 bits;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bits) : "r"(address));
    return __builtin_bit_cast(Value, bits);
  } else {
    u16 bits;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(bits) : "r"(address));
    return __builtin_bit_cast(Value, bits);
  }
}
template <class Value>
__device__ __forceinline__ void write_value(u32 address, Value value) {
  if constexpr (sizeof(Value) == 8)
    asm volatile("st.shared.b64 [%0], %1;" ::"r"(address), "l"(__builtin_bit_cast(u64, value))
                 : "memory");
  else if constexpr (sizeof(Value) == 4)
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(__builtin_bit_cast(u32, value))
                 : "memory");
  else
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(__builtin_bit_cast(u16, value))
                 : "memory");
}

__device__ __forceinline__ bool is_complete(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

struct no_idle {};

// While the producer waits for a free stage it asks L2 for two ranges of memory side by side, 8 KB
// at a time. It waits `cycles` between two requests, so that all SMs together take half of the
// memory's rate: what other CTAs poll would queue behind more.
struct l2_ahead {
  static constexpr int piece = 4096, cycles = 800;
  const u8 *first = nullptr, *second = nullptr;
  int at = 0, first_end = 0, second_end = 0;
  u32 last = 0;  // clock of the last request

  __device__ __forceinline__ void operator()() {
    if (at >= first_end && at >= second_end) return;
    const u32 now = __shfl_sync(~0u, static_cast<u32>(clock()), 0);
    if (now - last < u32{cycles}) return;
    last = now;
    if (is_elected()) {
      if (at < first_end) prefetch_l2(first + at, smaller(piece, first_end - at));
      if (at < second_end) prefetch_l2(second + at, smaller(piece, second_end - at));
    }
    at += piece;
  }
};

template <int stages, int barrier_bytes, int stage_bytes, class Idle = no_idle>
struct stream_pipeline {
  u32 stage = 0, parity = 0;          // the next one
  u32 oldest = 0, oldest_parity = 0;  // of the stages in flight
  int in_flight = 0;
  int most_in_flight;  // stages that are being copied at a time
  u32 shared;
  Idle idle = {};

  __device__ __forceinline__ u32 full() const { return shared + 8 * stage; }
  __device__ __forceinline__ u32 empty() const { return shared + 8 * (stages + stage); }
  __device__ __forceinline__ u32 buffer() const {
    return shared + barrier_bytes + stage * stage_bytes;
  }
  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // The producer: waits until the next stage is free, and few enough are being copied.
  __device__ __forceinline__ void begin_load() {
    if constexpr (!is_same<Idle, no_idle>) {
      int spins = 0;
      while (!is_complete(empty(), parity ^ 1)) {
        idle();
        count_spin(spins);
      }
    } else {
      wait_for_stage(empty(), parity ^ 1);
    }
    // More copies in flight would not be faster, but what other CTAs poll would queue behind them.
    while (in_flight >= most_in_flight) {
      wait_for_stage(shared + 8 * oldest, oldest_parity);
      if (++oldest == stages) {
        oldest = 0;
        oldest_parity ^= 1;
      }
      --in_flight;
    }
    ++in_flight;
  }

  // Up to 16 rows, of two matrices: the first `rows` at `from`, then `more_rows` at `more`, each
  // `pitch` bytes after the one before. `places`: those of the first.
  __device__ __forceinline__ void load(const u8* from, int rows, const u8* more, int more_rows,
                                       int places, i64 pitch, u32 bytes, u32 stride) {
    begin_load();
    if (is_elected()) {
      const u32 barrier = full(), to = buffer();
      const int count = rows + more_rows;
      if (count > 0)
        barrier_arrive_expect(barrier, count * bytes);
      else
        barrier_arrive(barrier);
      load_rows(to, from, rows, pitch, bytes, stride, barrier);
      load_rows(to + places * stride, more, more_rows, pitch, bytes, stride, barrier);
    }
    advance();
  }

  // Rows of `pieces`, each `bytes` long, that lie `gap` bytes apart in memory and next to each
  // other here.
  __device__ __forceinline__ void load_pieces(const u8* from, int rows, i64 pitch, int pieces,
                                              i64 gap, u32 bytes, u32 stride) {
    begin_load();
    if (is_elected()) {
      if (rows > 0)
        barrier_arrive_expect(full(), rows * pieces * bytes);
      else
        barrier_arrive(full());
      for (int piece = 0; piece < pieces; ++piece)
        load_rows(buffer() + piece * bytes, from + piece * gap, rows, pitch, bytes, stride, full());
    }
    advance();
  }

  // Rows of zeros in the place of what is not in memory. All lanes.
  __device__ __forceinline__ void load_zeros(int rows, u32 bytes, u32 stride) {
    begin_load();
    const int vectors = static_cast<int>(bytes / 16);
    for (int at = static_cast<int>(threadIdx.x % 32); at < rows * vectors; at += 32)
      write_shared(buffer() + at / vectors * stride + at % vectors * 16, vector16{});
    async_proxy_fence();
    __syncwarp();
    if (is_elected()) barrier_arrive(full());
    advance();
  }

  // An MMA warp: when the stage is there, and when it has been read.
  __device__ __forceinline__ void wait() const { wait_for_stage(full(), parity); }
  // One lane arrives for the warp: __syncwarp() orders the others' reads before that, which
  // racecheck does not take into account.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty());
    advance();
  }

 private:
  static __device__ __forceinline__ void load_rows(u32 to, const u8* from, int rows, i64 pitch,
                                                   u32 bytes, u32 stride, u32 barrier) {
#pragma unroll 4
    for (int row = 0; row < rows; ++row)
      bulk_load(to + row * stride, from + row * pitch, bytes, barrier, l2_policy::evict_first);
  }
};

// A warp's MMAs of its part of a stage: every `warps`-th step of 4 * weight::elements of k, `steps`
// of them. Four sets of accumulators take turns, because an MMA waits for the one before that has
// the same.
template <class W, class T, int warps, int steps>
struct stage_product {
  using weight = stream_type<W>;
  using token = stream_type<T>;
  using element = typename token::operand;
  static constexpr int pairs = weight::elements / 2, k_step = 4 * weight::elements;
  static constexpr int token_vectors = weight::elements / token::elements;
  static_assert(is_same<typename weight::scale, no_scale>, "a stage has no place for scales");
  using accumulators = float[4][4];

  // This lane's weights of a stage.
  struct fragment {
    vector16 low[steps], high[steps];
  };

  // The address is that of this lane's 16 bytes of the warp's first step.
  static __device__ __forceinline__ void load(fragment& of, u32 weights, u32 row_stride) {
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      of.low[i] = read_shared(weights + i * warps * 64);
      of.high[i] = read_shared(weights + i * warps * 64 + 8 * row_stride);
    }
  }

  // Addresses of this lane's 16 bytes, or vectors of tokens, of the warp's first step; `at` is that
  // step's element of k.
  static __device__ __forceinline__ void run(accumulators& sum, u32 weights, u32 row_stride,
                                             u32 tokens, bool has_token, int at, int end) {
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      if (at + i * warps * k_step >= end) continue;
      multiply(sum, i, read_shared(weights + i * warps * 64),
               read_shared(weights + i * warps * 64 + 8 * row_stride), tokens, has_token);
    }
  }
  static __device__ __forceinline__ void run(accumulators& sum, const fragment& of, u32 tokens,
                                             bool has_token, int at, int end) {
#pragma unroll
    for (int i = 0; i < steps; ++i)
      if (at + i * warps * k_step < end) multiply(sum, i, of.low[i], of.high[i], tokens, has_token);
  }

 private:
  static __device__ __forceinline__ void multiply(accumulators& sum, int step, const vector16& low,
                                                  const vector16& high, u32 tokens,
                                                  bool has_token) {
    u32 low_pair[pairs], high_pair[pairs], column[pairs];
#pragma unroll
    for (int vector = 0; vector < token_vectors; ++vector) {
      vector16 b = {};
      if (has_token) b = read_shared(tokens + step * warps * 64 * token_vectors + vector * 16);
      token::template expand<element>(b, {}, column + vector * (token::elements / 2));
    }
    weight::template expand<element>(low, {}, low_pair);
    weight::template expand<element>(high, {}, high_pair);
#pragma unroll
    for (int pair = 0; pair < pairs; pair += 2)
      mma_pairs<element>(sum[(step * pairs + pair) / 2 % 4], low_pair, high_pair, column, pair);
  }
};

}  // namespace fftune
