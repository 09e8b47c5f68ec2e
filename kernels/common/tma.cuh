// TMA (sm_90): copies of boxes of a tensor, described by a tensor map, between global and shared
// memory.
#pragma once

#include "common/barrier.cuh"
#include "common/tensor_map.cuh"

namespace fftune {

// Cache policies as createpolicy encodes them for fractional L2 eviction classes.
enum class l2_policy : u64 {
  evict_normal = 0x1000000000000000,
  evict_first = 0x12F0000000000000,
  evict_last = 0x14F0000000000000,
};

__device__ __forceinline__ void tma_prefetch(const tensor_map& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Prefetches the box at element (inner, outer) to L2.
__device__ __forceinline__ void tma_prefetch(const tensor_map& map, int inner, int outer) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(inner),
               "r"(outer)
               : "memory");
}

__device__ __forceinline__ void tma_prefetch(const tensor_map& map, int inner, int outer,
                                             int matrix) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(&map),
               "r"(inner), "r"(outer), "r"(matrix)
               : "memory");
}

// Loads the box at element (inner, outer) into `shared`; its bytes count towards `barrier`.
__device__ __forceinline__ void tma_load(u32 shared, const tensor_map& map, u32 barrier, int inner,
                                         int outer, l2_policy policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(&map), "r"(inner), "r"(outer), "r"(barrier), "l"(static_cast<u64>(policy))
      : "memory");
}

// The same into every block of the cluster whose bit is set in `blocks`, at the same address and
// barrier in each.
__device__ __forceinline__ void tma_load_multicast(u32 shared, const tensor_map& map, u32 barrier,
                                                   int inner, int outer, u16 blocks,
                                                   l2_policy policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(shared),
      "l"(&map), "r"(inner), "r"(outer), "r"(barrier), "h"(blocks), "l"(static_cast<u64>(policy))
      : "memory");
}

// Stores the box from `shared`; elements outside the tensor are not written.
__device__ __forceinline__ void tma_store(const tensor_map& map, u32 shared, int inner, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
      "r"(inner), "r"(outer), "r"(shared)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// The same with a tensor map of three dimensions, at element (inner, outer) of matrix number
// `matrix`.
__device__ __forceinline__ void tma_load(u32 shared, const tensor_map& map, u32 barrier, int inner,
                                         int outer, int matrix, l2_policy policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
      "l"(&map), "r"(inner), "r"(outer), "r"(matrix), "r"(barrier), "l"(static_cast<u64>(policy))
      : "memory");
}

__device__ __forceinline__ void tma_load_multicast(u32 shared, const tensor_map& map, u32 barrier,
                                                   int inner, int outer, int matrix, u16 blocks,
                                                   l2_policy policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(shared),
      "l"(&map), "r"(inner), "r"(outer), "r"(matrix), "r"(barrier), "h"(blocks),
      "l"(static_cast<u64>(policy))
      : "memory");
}

__device__ __forceinline__ void tma_store(const tensor_map& map, u32 shared, int inner, int outer,
                                          int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
      "r"(inner), "r"(outer), "r"(matrix), "r"(shared)
      : "memory");
}

// Loads `bytes` contiguous bytes, as tma_load does; addresses and sizes are multiples of 16.
__device__ __forceinline__ void bulk_load(u32 shared, const void* global, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// Adds `bytes` of floats to memory, part of a group as tma_store is.
__device__ __forceinline__ void bulk_add(float* global, u32 shared, u32 bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
      "r"(shared), "r"(bytes)
      : "memory");
}

// Waits until all but the last `pending` groups of this thread's stores have read their shared
// memory.
template <int pending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Waits until they are complete, and visible to this thread.
template <int pending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

// Orders this thread's generic-proxy writes to shared memory before later reads by TMA or wgmma.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace fftune
