// The best of the ranks' ids in one block. A rank sends each row's logit and id to every peer as
// two packets of 8 bytes, each with the epoch as its other half, and polls what peers send.
#include "common/all_reduce.cuh"
#include "common/peers.cuh"

namespace fftune {

// Fields of the parameters: x is logit, residual ids, y best_logit, sum best_ids, d the ids of a
// rank's slice. Grid: 1.
template <int ranks>
__global__ void __launch_bounds__(256)
    all_argmax(const __grid_constant__ all_reduce_params params) {
  wait_and_launch_dependents();
  const float* const logits = static_cast<const float*>(params.x);
  const int* const ids = static_cast<const int*>(params.residual);
  peer_group<ranks> group(params.table, params.loopback, params.tag);
  group.require_room(static_cast<u64>(params.rows) * 16, group.packet_bytes);
  const auto slot = [&](char* memory, u32 sender) {
    return memory + group.slot_offset(group.packets, group.packet_bytes, sender);
  };
  for (i64 row = threadIdx.x; row < params.rows && !group.failed; row += blockDim.x)
#pragma unroll
    for (int p = 0; p < ranks; ++p)
      if (group.is_peer(p))
        store_packets(slot(group.base[p], group.slot_at(p)) + row * 16,
                      __float_as_uint(logits[row]), static_cast<u32>(ids[row]), group.epoch);
  if (threadIdx.x < 32) group.greet(static_cast<int>(threadIdx.x));

  for (i64 row = threadIdx.x; row < params.rows; row += blockDim.x) {
    float best = 0.0f;
    int best_id = 0;
#pragma unroll
    for (int p = 0; p < ranks; ++p) {
      u32 logit = __float_as_uint(logits[row]), id = static_cast<u32>(ids[row]);
      if (group.is_peer(p))
        group.wait(
            p, [&] { return load_packets(slot(group.own, p) + row * 16, group.epoch, logit, id); });
      const float value = __uint_as_float(logit);
      // NaN is above every number.
      if (p > 0 && !(value > best || (value != value && best == best))) continue;
      best = value;
      best_id = static_cast<int>(id + static_cast<u32>(p) * static_cast<u32>(params.d));
    }
    if (group.failed) continue;
    static_cast<float*>(params.y)[row] = best;
    static_cast<int*>(params.sum)[row] = best_id;
  }
  __syncthreads();
  if (threadIdx.x == 0) group.finish();
}

}  // namespace fftune
