// Shared memory, the copies that fill it, and everything that threads wait for.
//
//   cp.async     copies of 4 to 16 bytes by a thread (sm_80).
//   shared       loads and stores of shared memory by address.
//   clusters     barriers and shared memory of the CTAs of a cluster (sm_90).
//   barriers     mbarriers (sm_90) and named barriers.
//   TMA          copies of boxes of a tensor by a tensor map (sm_90).
//   pipeline     stages of shared memory with a full and an empty barrier each (sm_90).
//   PDL          programmatic dependent launch (sm_90).
//   flags        the flag in the data's word: communication between CTAs without fences.
//
// Sources of every architecture call the functions of clusters and PDL. On architectures before
// sm_90 these functions are empty, so that the sources need no conditions.
#pragma once

#include "common/types.cuh"

namespace fftune {

// --- cp.async (sm_80): global to shared memory without passing through registers ---

// Copies 16 bytes, or writes 16 zero bytes without reading global memory when `valid` is false: the
// padding of partial tiles. .cg bypasses L1, which would only duplicate shared memory.
__device__ __forceinline__ void copy_async(u32 shared, const void* global, bool valid) {
  const u32 bytes = valid ? 16u : 0u;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// Copies 4 or 8 bytes, for rows without a wider alignment; .cg takes 16 bytes only.
template <int size>
__device__ __forceinline__ void copy_async_narrow(u32 shared, const void* global, bool valid) {
  const int bytes = valid ? size : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global),
               "n"(size), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `pending` of this thread's committed groups are still in flight.
template <int pending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// --- Shared memory by address ---

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ float4 load_shared(u32 address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_shared(u32 address, float4 value) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}
__device__ __forceinline__ float2 load_shared_pair(u32 address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_shared(u32 address, float2 value) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x), "f"(value.y)
               : "memory");
}
__device__ __forceinline__ void store_shared_word(u32 address, u32 word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
__device__ __forceinline__ float load_shared_float(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_shared(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ u32 load_shared_word(u32 address) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_shared(u32 address, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// --- Clusters (sm_90) ---
//
// Thread block clusters: blocks that run at the same time and can read each other's shared memory.
// On older architectures these functions are never reached.

// Every thread of the cluster calls both, once each: what it wrote to shared memory before the
// first is visible to all of them after the second.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}

// The address in block `rank` of the cluster that corresponds to this block's shared-memory
// address.
__device__ __forceinline__ u32 cluster_address(u32 shared, u32 rank) {
  u32 address = shared;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
#endif
  return address;
}

__device__ __forceinline__ float4 load_cluster(u32 address) {
  float4 value = {};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
#endif
  return value;
}

__device__ __forceinline__ u32 load_cluster_word(u32 address) {
  u32 value = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
#endif
  return value;
}

// Stores without waiting; the bytes count towards the mbarrier at address `barrier` of the block
// that is written to (both by cluster_address).
__device__ __forceinline__ void store_cluster_async(u32 address, float4 value, u32 barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
#endif
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// --- Barriers ---
//
// mbarriers (sm_90): counted arrivals and bytes, waited for by phase parity; and named barriers
// among warps.

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA and to the other blocks of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival that also announces `bytes` of copies to come.
__device__ __forceinline__ void barrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Announces `bytes` of copies to come, before an arrival of this thread.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at the barrier that lies at the same address in block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_remote(u32 barrier, u32 rank) {
  asm volatile(
      "{.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Several arrivals at once.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}

// One arrival, as soon as all of this thread's copy_async so far are complete.
__device__ __forceinline__ void barrier_arrive_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of this parity is complete. A new barrier is in phase 0, so waiting for
// parity 1 passes.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Named barrier `id` (1 to 15) among `threads` threads of the block.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// One lane of the warp, once all are here. Unlike with a comparison of lanes, ptxas makes no loop
// over the lanes around each bulk copy, which would take longer than the copy.
__device__ __forceinline__ bool is_elected() {
  u32 elected = 0;
  asm volatile(
      "{.reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "@chosen mov.u32 %0, 1;}"
      : "+r"(elected));
  return elected != 0;
}

// --- TMA (sm_90) ---
//
// Copies boxes of a tensor, described by a tensor map, between global and shared memory.

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

// --- Pipeline ---
//
// A pipeline of stages in shared memory, from producer warps that load them to MMA warpgroups.

// A state of the pipeline: the stage that is next, and the phase of its barriers. A stage's full
// barrier completes when its bytes and arrivals are there, its empty one when all readers are done.
template <int stages, int stage_bytes>
struct pipeline {
  u32 buffers, full, empty;
  u32 index = 0, phase = 0;

  __device__ __forceinline__ u32 buffer() const { return buffers + index * stage_bytes; }
  __device__ __forceinline__ u32 full_barrier() const { return full + index * 8; }
  __device__ __forceinline__ u32 empty_barrier() const { return empty + index * 8; }
  __device__ __forceinline__ void advance() {
    if (++index == stages) {
      index = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void advance(u32 count) {
    phase ^= (index + count) / stages & 1;
    index = (index + count) % stages;
  }
  __device__ __forceinline__ void retreat(int count) {
    for (int i = 0; i < count; ++i) {
      phase ^= index == 0 ? 1 : 0;
      index = index == 0 ? stages - 1 : index - 1;
    }
  }
  // The first pass over the stages finds them empty.
  __device__ __forceinline__ void wait_empty() const { barrier_wait(empty_barrier(), phase ^ 1); }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full_barrier(), phase); }

  // Producers in a cluster: until every stage is released, as a CTA may not exit while peers still
  // multicast into it or signal its barriers.
  __device__ __forceinline__ void drain() {
    for (int stage = 0; stage < stages; ++stage, advance()) wait_empty();
  }
};

// --- Programmatic dependent launch (sm_90) ---
//
// A kernel may start while the one before it in the stream still runs. On older architectures these
// functions do nothing: there every launch waits for the one before it.

// Lets the next kernel of the stream start, where it was launched for that.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this one are complete and their writes visible. Their results must
// not be read before that, nor through the read-only path (ld.global.nc) at all.
__device__ __forceinline__ void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Prefetches bytes to L2; address and size are multiples of 16. It may precede
// wait_for_dependencies(): the kernel gets no data from it, and later writes of the kernel before
// go through the same L2.
__device__ __forceinline__ void prefetch_l2([[maybe_unused]] const void* address,
                                            [[maybe_unused]] unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
#endif
}

// The first statement of a kernel that may be the first of a plan and is launched
// programmatically. The kernel accesses no tensor before all earlier kernels are complete, and lets
// the next kernel start only then: the next kernel may therefore load, without a wait, whatever was
// written before this one.
__device__ __forceinline__ void wait_and_launch_dependents() {
  wait_for_dependencies();
  launch_dependents();
}

// --- Flag in data ---
//
// Communication between blocks of one launch without fences: the flag is in the data's word. A word
// of 16 bytes is read and written in one access (PTX ISA, "Memory consistency model": .b128 scalars
// are one memory operation), so a reader that sees the flag has the data too. This takes one round
// trip to L2; a separate flag takes a fence and a second round trip.

struct flagged_word {
  u32 data[2];
  u64 flag;
};

__device__ __forceinline__ void store_flagged(void* address, u32 first, u32 second, u64 flag) {
  asm volatile(
      "{.reg .b128 word;\n"
      ".reg .b64 data;\n"
      "mov.b64 data, {%1, %2};\n"
      "mov.b128 word, {data, %3};\n"
      "st.relaxed.gpu.global.b128 [%0], word;}" ::"l"(address),
      "r"(first), "r"(second), "l"(flag)
      : "memory");
}

__device__ __forceinline__ flagged_word load_flagged(const void* address) {
  flagged_word word;
  asm volatile(
      "{.reg .b128 word;\n"
      ".reg .b64 data;\n"
      "ld.relaxed.gpu.global.b128 word, [%3];\n"
      "mov.b128 {data, %2}, word;\n"
      "mov.b64 {%0, %1}, data;}"
      : "=r"(word.data[0]), "=r"(word.data[1]), "=l"(word.flag)
      : "l"(address)
      : "memory");
  return word;
}

// The flag of the run after the one of this flag: a linear congruential generator (Knuth, MMIX) of
// full period and without a fixed point. Memory that no run has written, all zeros, all of one
// byte or anything else, holds the next flag no more often than 64 random bits would.
__device__ __forceinline__ u64 next_flag(u64 flag) {
  return flag * 6364136223846793005ull + 1442695040888963407ull;
}

}  // namespace fftune
