// Programmatic dependent launch (sm_90): a kernel may start while the one before it in the stream
// still runs. On older architectures these functions exist, so that sources need no conditions, and
// do nothing: there every launch waits for the one before it.
#pragma once

namespace fftune {

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

}  // namespace fftune
