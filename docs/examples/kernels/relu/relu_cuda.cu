// y = max(x, 0) over pairs of bf16. Grid: ceil(pairs / (threads * per_thread)) blocks of `threads`.
namespace fftune {

template <int threads, int per_thread>
__global__ void __launch_bounds__(threads)
    relu_cuda(const unsigned* x, unsigned* y, long long pairs) {
  const long long first = static_cast<long long>(blockIdx.x) * threads * per_thread + threadIdx.x;
#pragma unroll
  for (int i = 0; i < per_thread; ++i) {
    const long long pair = first + i * threads;
    if (pair >= pairs) return;
    unsigned value = x[pair];
    // Each half that has its sign bit set becomes zero.
    if (value & 0x8000u) value &= 0xffff0000u;
    if (value & 0x80000000u) value &= 0x0000ffffu;
    y[pair] = value;
  }
}

}  // namespace fftune
