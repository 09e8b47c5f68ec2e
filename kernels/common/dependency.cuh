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

// Waits until the kernels before this one are complete and their writes visible. What they write
// must not be read before it, nor through the read-only path (ld.global.nc) at all.
__device__ __forceinline__ void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Asks for bytes to be brought to L2, a multiple of 16 from an address that is one: a hint, which
// may be given before the kernel's turn, as it reads nothing. Whatever is written until then passes
// L2 too.
__device__ __forceinline__ void fetch_to_l2([[maybe_unused]] const void* address,
                                            [[maybe_unused]] unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
#endif
}

// What a kernel does first that may be the first of a plan and start early: it touches nothing
// before whatever ran before it is complete, and only then lets the next kernel start, which may
// fetch what is older than this one.
__device__ __forceinline__ void take_turn() {
  wait_for_dependencies();
  launch_dependents();
}

}  // namespace fftune
