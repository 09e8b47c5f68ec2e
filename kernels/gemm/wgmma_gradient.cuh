// From the accumulators of the wgmma engine to the gradients of a gate: boxes of gate and up come
// in by TMA while the main loop runs, and d_gate and d_up leave from where these were.
#pragma once

#include "common/dependency.cuh"
#include "gemm/wgmma_store.cuh"

namespace fftune {

// The tensor maps are those of the outputs' boxes, those of gate and up too.
struct wgmma_gradient_maps {
  const tensor_map& gate;
  const tensor_map& up;
  const tensor_map& d_gate;
  const tensor_map& d_up;
  const tensor_map& hidden;  // unused with two outputs

  // The one that is used first.
  __device__ __forceinline__ const tensor_map& first() const { return gate; }
};

// Where a consumer's share of a tile lies, if there is such a tile.
struct tile_place {
  bool pending;
  int token, feature;
};

template <class T, class Epilogue, wgmma_tile tile>
struct wgmma_gradient_store {
  static constexpr int buffers = Epilogue::outputs;  // of a box: gate, up, and hidden beside them
  using layout = wgmma_layout<tile, 1, buffers>;
  static constexpr int values = layout::columns / 2;
  using sums = float[layout::parts][1][values];
  using owned_sums = sums;
  using boxes = wgmma_boxes<tile.output_boxes, layout::box_bytes * buffers>;
  using outputs = wgmma_gradient_maps;
  // gate and up come into the buffers that the last tile's outputs leave: a few k tiles on, these
  // are gone, and nobody waits.
  static constexpr bool fetches = true;
  static constexpr int fetch_after = 4;
  // Or the boxes are numbered through all tiles in the order in which they are finished, and each
  // is fetched when its buffer is free, while the next box is finished in another. In ping-pong the
  // consumers take tiles in turn and share a ring; a buffer then serves a tile once at most. A wait
  // by parity cannot tell a round that has not come from one that is past, so a consumer waits for
  // its boxes only after the other one has had all of its own.
  static constexpr u32 sharers = tile.ping_pong ? tile.consumers : 1;
  static constexpr u32 places = tile.output_boxes * sharers;
  static constexpr bool fetches_ahead = places >= (tile.ping_pong ? layout::boxes : 2);
  static_assert(!tile.swapped && tile.split_k == 1);

  // For the first tile's consumer to call: starts to fill the whole ring. `place_of(n)` is the
  // tile_place of the n-th tile after this one. What is fetched may be an earlier kernel's work.
  template <class PlaceOf>
  static __device__ __forceinline__ void begin(const boxes& ring, const outputs& from,
                                               const PlaceOf& place_of) {
    if (threadIdx.x % 128 != 0) return;
    wait_for_dependencies();
#pragma unroll
    for (u32 number = 0; number < places; ++number) refill(ring, from, number, 0, place_of);
  }

  // The tile that is `ordinal` among those of the ring, all of whose boxes but the first ones of
  // the block have been asked for when others were done with their buffers: the next tile's arrive
  // while its main loop runs.
  template <class PlaceOf>
  static __device__ __forceinline__ void store_ahead(const sums& sum, const boxes& ring,
                                                     const outputs& to, u32 ordinal,
                                                     const PlaceOf& place_of, int barrier_id) {
    const bool first = threadIdx.x % 128 == 0;
    const tile_place here = place_of(0);
    if (first) wait_for_dependencies();
    const int consumer = tile.ping_pong ? ordinal % 2 : 0;
    if constexpr (tile.ping_pong) named_barrier_sync(6 + consumer, 256);
#pragma unroll
    for (int box = 0; box < layout::boxes; ++box) {
      const u32 number = ordinal * layout::boxes + box;
      const u32 barrier = ring.barriers + number % places * 8;
      const u32 parity = number / places & 1;
      barrier_wait(barrier, parity);
      if (tile.ping_pong && box + 1 == layout::boxes) {
        named_barrier_arrive(6 + (consumer ^ 1), 256);
      }
      finish_box(sum, ring.buffer(number % places), to, box,
                 here.feature + box * layout::box_features, here.token, barrier_id);
      if (first && box > 0) {
        tma_store_wait_read<1>();
        refill(ring, to, number - 1 + places, ordinal, place_of);
      }
    }
    if (first) {
      tma_store_wait_read<0>();
      refill(ring, to, ordinal * layout::boxes + layout::boxes - 1 + places, ordinal, place_of);
    }
  }

  // Starts to fetch gate and up for this consumer's first boxes, for store() to find. What they
  // come from may be an earlier kernel's work.
  static __device__ __forceinline__ void fetch_residual(const boxes& ring, const outputs& to,
                                                        int token, int feature) {
    if (threadIdx.x % 128 != 0) return;
    wait_for_dependencies();
    tma_store_wait_read<0>();
#pragma unroll
    for (int box = 0; box < tile.output_boxes; ++box) {
      fetch(ring, (ring.index + box) % tile.output_boxes, to, feature + box * layout::box_features,
            token);
    }
  }

  static __device__ __forceinline__ void store(const sums& sum, boxes& ring, const outputs& to,
                                               int token, int feature, int, int barrier_id) {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int box = 0; box < layout::boxes; ++box) {
      const u32 place = ring.take(), buffer = ring.buffer(place);
      ring.wait(place);
      const int column = feature + box * layout::box_features;
      finish_box(sum, buffer, to, box, column, token, barrier_id);
      if (thread == 0 && box + tile.output_boxes < layout::boxes) {
        tma_store_wait_read<0>();
        fetch(ring, place, to, column + tile.output_boxes * layout::box_features, token);
      }
    }
  }

 protected:
  // The buffer of the box that is `number` among all, if there is a tile for it; `ordinal` is that
  // of place_of(0).
  template <class PlaceOf>
  static __device__ __forceinline__ void refill(const boxes& ring, const outputs& from, u32 number,
                                                u32 ordinal, const PlaceOf& place_of) {
    const tile_place at = place_of(number / layout::boxes - ordinal);
    if (!at.pending) return;
    const int column = at.feature + static_cast<int>(number % layout::boxes) * layout::box_features;
    fetch(ring, number % places, from, column, at.token);
  }

  // One box: what is in the buffer becomes the outputs, which one thread starts to store.
  static __device__ __forceinline__ void finish_box(const sums& sum, u32 buffer, const outputs& to,
                                                    int box, int column, int token,
                                                    int barrier_id) {
    write(sum, buffer, box);
    async_proxy_fence();
    named_barrier_sync(barrier_id, 128);
    if (threadIdx.x % 128 != 0) return;
    tma_store(to.d_gate, buffer, column, token);
    tma_store(to.d_up, buffer + layout::box_bytes, column, token);
    if constexpr (buffers == 3) {
      tma_store(to.hidden, buffer + 2 * layout::box_bytes, column, token);
    }
    tma_store_commit();
  }

  static __device__ __forceinline__ void fetch(const boxes& ring, u32 place, const outputs& from,
                                               int feature, int token) {
    const u32 barrier = ring.barriers + place * 8, buffer = ring.buffer(place);
    barrier_arrive_expect(barrier, 2 * layout::box_bytes);
    tma_load(buffer, from.gate, barrier, feature, token, l2_policy::evict_first);
    tma_load(buffer + layout::box_bytes, from.up, barrier, feature, token, l2_policy::evict_first);
  }

  // Two neighbouring elements.
  static __device__ __forceinline__ void finish(float first, float second, u32 gate, u32 up,
                                                u32 (&word)[buffers]) {
    float gates[2], ups[2], low[buffers], high[buffers];
    unpack<T>(gate, gates[0], gates[1]);
    unpack<T>(up, ups[0], ups[1]);
    Epilogue::apply(first, gates[0], ups[0], low);
    Epilogue::apply(second, gates[1], ups[1], high);
#pragma unroll
    for (int i = 0; i < buffers; ++i) word[i] = pack<T>(low[i], high[i]);
  }

  // The place of a thread's row and chunk for stmatrix in a box, as in wgmma_store.
  static __device__ __forceinline__ u32 place_of(u32 buffer, int part, int step) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const int row = part * 64 + thread / 32 * 16 + (lane & 15);
    const int swizzle = layout::box_features == 64 ? row & 7 : row >> 1 & 3;
    const int chunk = step * 2 + (lane >> 4);
    return buffer + row * layout::box_features * 2 + ((chunk ^ swizzle) << 4);
  }

  // consumer_rows tokens x box_features of each buffer, 32 features at a time: of so many all of
  // gate and up is loaded first. The loads and stores keep their order, and would wait for each
  // other.
  static __device__ __forceinline__ void write(const sums& sum, u32 buffer, int box) {
    constexpr int all = layout::box_features / 16, steps = smaller(all, 2);
#pragma unroll
    for (int first = 0; first < all; first += steps) {
      u32 gate[layout::parts][steps][4], up[layout::parts][steps][4];
#pragma unroll
      for (int part = 0; part < layout::parts; ++part) {
#pragma unroll
        for (int step = 0; step < steps; ++step) {
          const u32 place = place_of(buffer, part, first + step);
          reload_matrices<false>(place, gate[part][step]);
          reload_matrices<false>(place + layout::box_bytes, up[part][step]);
        }
      }
#pragma unroll
      for (int part = 0; part < layout::parts; ++part) {
#pragma unroll
        for (int step = 0; step < steps; ++step) {
          store_results(&sum[part][0][(box * all + first + step) * 8], gate[part][step],
                        up[part][step], place_of(buffer, part, first + step));
        }
      }
    }
  }

  // A thread's eight elements of a step, as stmatrix has them.
  static __device__ __forceinline__ void store_results(const float* value, const u32 (&gate)[4],
                                                       const u32 (&up)[4], u32 place) {
    u32 result[buffers][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 word[buffers];
      finish(value[i * 2], value[i * 2 + 1], gate[i], up[i], word);
#pragma unroll
      for (int output = 0; output < buffers; ++output) result[output][i] = word[output];
    }
#pragma unroll
    for (int output = 0; output < buffers; ++output) {
      store_matrices<false>(place + output * layout::box_bytes, result[output]);
    }
  }
};

}  // namespace fftune
