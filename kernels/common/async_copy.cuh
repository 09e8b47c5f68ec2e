// cp.async (sm_80): 16 bytes from global to shared memory without passing through registers.
#pragma once

#include "common/types.cuh"

namespace fftune {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or writes 16 zero bytes without reading global memory when `valid` is false: the
// padding of partial tiles. .cg bypasses L1, which would only duplicate shared memory.
__device__ __forceinline__ void copy_async(u32 shared, const void* global, bool valid) {
  const u32 bytes = valid ? 16u : 0u;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// The same of 4 or 8 bytes, for rows that are aligned to no more. .cg has 16 bytes alone.
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

}  // namespace fftune
