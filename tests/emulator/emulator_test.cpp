// The emulated GPU itself: what it computes, and the faults that it finds. `./dev emulate` runs the
// cases; without the emulator they skip.
#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "cuda/device.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"

using namespace fftune;
using namespace fftune::testing;

namespace {

/// A device with one kernel `run`, which gets up to two tensors of floats.
class Emulated {
 public:
  explicit Emulated(const std::string& source)
      : sources_(std::map<std::string, std::string>{{"test/run.cu", source}}) {
    try {
      backend_ = open_cuda(0, sources_, {});
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unavailable) throw;
    }
    if (backend_ && !backend_->facts().name.starts_with("Emulated")) backend_.reset();
  }

  explicit operator bool() const { return backend_ != nullptr; }
  const DeviceFacts& facts() const { return backend_->facts(); }

  /// A tensor that begins as `values`, after the kernel.
  std::vector<float> run(std::vector<float> values, Dim3 grid, Dim3 block,
                         Dim3 cluster = {1, 1, 1}) {
    Program program = one_launch("test/run.cu", "run", grid, block, {TensorArgument{0}});
    std::get<KernelLaunch>(program.steps[0]).cluster = cluster;
    const auto compiled = backend_->compile(program);
    REQUIRE(compiled.report.failure == "");
    const auto buffer = backend_->allocate(values.size() * sizeof(float));
    backend_->write(buffer->data(), values.data(), buffer->bytes());
    void* const tensors[] = {buffer->data()};
    compiled.executable->enqueue(tensors, nullptr, backend_->stream());
    backend_->synchronize();
    backend_->read(values.data(), buffer->data(), buffer->bytes());
    return values;
  }

  /// The words of a fault.
  std::string fault(std::size_t elements, Dim3 grid, Dim3 block) {
    return test::error_of([&] { run(std::vector<float>(elements), grid, block); });
  }

 private:
  SourceSet sources_;
  std::unique_ptr<Backend> backend_;
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

constexpr const char* no_emulator = "libcuda.so.1 is not the emulator: run ./dev emulate emulator";

}  // namespace

TEST_CASE("lanes that part at branches meet again, and shuffles see the others' values") {
  Emulated device(R"(extern "C" __global__ void run(float* x) {
    const int lane = threadIdx.x;
    float value = x[lane];
    for (int i = 0; i < lane; ++i) value += i % 3 == 0 ? 2.0f : 1.0f;
    for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
    const unsigned odd = __ballot_sync(~0u, lane % 2);
    const unsigned same = __match_any_sync(~0u, lane % 3);
    x[32 + lane] = __reduce_add_sync(same, lane);
    x[lane] = lane % 5 == 0 ? value : __popc(odd >> lane);
  })");
  if (!device) FFTUNE_SKIP(no_emulator);
  float sum = 0;
  for (int lane = 0; lane < 32; ++lane)
    for (int i = -1; i < lane; ++i) sum += i < 0 ? 1.0f : i % 3 == 0 ? 2.0f : 1.0f;
  const auto found = device.run(std::vector<float>(64, 1.0f), {1, 1, 1}, {32, 1, 1});
  CHECK(found[33] == 1 + 4 + 7 + 10 + 13 + 16 + 19 + 22 + 25 + 28 + 31);
  CHECK(found[0] == sum);
  CHECK(found[30] == sum);
  CHECK(found[31] == 1);
  CHECK(found[1] == 16);
}

TEST_CASE("arithmetic rounds as the instruction says") {
  Emulated device(R"(extern "C" __global__ void run(float* x) {
    x[0] = __fadd_rz(1.0f, 1.0e-7f); x[1] = __fadd_ru(1.0f, 1.0e-30f); x[2] = __fmaf_rn(x[6], x[6], -1.0f);
    x[3] = float(int(x[7])); x[4] = fminf(nanf(""), 2.0f);
    unsigned bits; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(1.00390625f), "f"(-3.0f));
    x[5] = __uint_as_float(bits);
  })");
  if (!device) FFTUNE_SKIP(no_emulator);
  const auto found = device.run({0, 0, 0, 0, 0, 0, 1 + 0x1p-12f, -1e30f}, {1, 1, 1}, {1, 1, 1});
  CHECK(found[0] == 1.0f);
  CHECK(found[1] == std::nextafter(1.0f, 2.0f));
  CHECK(found[2] == 0x1p-11f + 0x1p-24f);
  CHECK(found[3] == -2147483648.0f);
  CHECK(found[4] == 2);
  CHECK(std::bit_cast<std::uint32_t>(found[5]) == 0x3f80c040);
}

TEST_CASE("CTAs that wait for each other run in turns") {
  Emulated device(R"(extern "C" __global__ void run(float* x) {
    volatile float* const flags = x;
    if (threadIdx.x == 0) {
      flags[blockIdx.x] = 1;
      while (flags[gridDim.x - 1 - blockIdx.x] == 0) {}
    }
    __syncthreads();
    if (threadIdx.x == 64) x[gridDim.x + blockIdx.x] = 1 + blockIdx.x;
  })");
  if (!device) FFTUNE_SKIP(no_emulator);
  const auto found = device.run(std::vector<float>(40), {20, 1, 1}, {96, 1, 1});
  for (int i = 0; i < 20; ++i) CHECK(found[20 + i] == 1 + i);
}

TEST_CASE("an access past an allocation is a fault that names thread and instruction") {
  Emulated device(R"(extern "C" __global__ void run(float* x) { x[threadIdx.x] = 1; })");
  if (!device) FFTUNE_SKIP(no_emulator);
  const std::string text = device.fault(40, {1, 1, 1}, {64, 1, 1});
  CHECK(has(text, "run: thread 40 of CTA (0, 0, 0): st.global.u32"));
  CHECK(has(text, "0 bytes past the end of an allocation of 160 bytes"));
}

TEST_CASE("an access past shared memory is a fault") {
  Emulated past(R"(extern "C" __global__ void run(float* x) {
    __shared__ float own[8];
    own[threadIdx.x] = x[0]; __syncthreads(); x[threadIdx.x] = own[threadIdx.x ^ 1];
  })");
  if (!past) FFTUNE_SKIP(no_emulator);
  CHECK(has(past.fault(40, {1, 1, 1}, {16, 1, 1}), "4 bytes at 32 of 32 bytes of shared memory"));
}

TEST_CASE("a vector access that is not aligned is a fault") {
  Emulated device(R"(extern "C" __global__ void run(float* x) {
    *reinterpret_cast<float2*>(x + 1) = {1, 2};
  })");
  if (!device) FFTUNE_SKIP(no_emulator);
  CHECK(has(device.fault(40, {1, 1, 1}, {1, 1, 1}), "which is no multiple of 8"));
}

TEST_CASE("warps that wait for each other forever are told apart") {
  Emulated device(R"(extern "C" __global__ void run(float* x) {
    asm volatile("bar.sync %0, 64;" :: "r"(int(threadIdx.x / 32 + 1)) : "memory");
    x[0] = 1;
  })");
  if (!device) FFTUNE_SKIP(no_emulator);
  const std::string text = device.fault(1, {1, 1, 1}, {64, 1, 1});
  CHECK(has(text, "no warp can go on"));
  CHECK(has(text, "thread 32 of CTA (0, 0, 0), lanes 0xffffffff: bar.sync"));
}

TEST_CASE("copies happen when they are waited for") {
  const auto kernel = [](const std::string& wait) {
    return R"(extern "C" __global__ void run(float* x) {
      __shared__ float4 own;
      const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(&own));
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\ncp.async.commit_group;" :: "r"(to), "l"(x) : "memory");
      )" + wait +
           R"(
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x[4]) : "r"(to + 4) : "memory");
    })";
  };
  Emulated waits(kernel(R"(asm volatile("cp.async.wait_group 0;" ::: "memory");)"));
  if (!waits) FFTUNE_SKIP(no_emulator);
  CHECK(waits.run({1, 2, 3, 4, 5}, {1, 1, 1}, {1, 1, 1})[4] == 2);
  // Shared memory that nothing was written to is NaN.
  Emulated forgets(kernel(R"(asm volatile("cp.async.wait_group 1;" ::: "memory");)"));
  CHECK(std::isnan(forgets.run({1, 2, 3, 4, 5}, {1, 1, 1}, {1, 1, 1})[4]));
}

TEST_CASE("CTAs of a cluster read each other's shared memory") {
  Emulated device(R"(extern "C" __global__ void run(float* x) {
    __shared__ float own;
    unsigned rank; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    own = blockIdx.x;
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(&own));
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank ^ 1));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x[blockIdx.x]) : "r"(address) : "memory");
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  })");
  if (!device) FFTUNE_SKIP(no_emulator);
  if (device.facts().compute_capability < 90) return;  // no clusters
  CHECK(device.run(std::vector<float>(4), {4, 1, 1}, {1, 1, 1}, {2, 1, 1}) ==
        std::vector<float>{1, 0, 3, 2});
}
