#include "worker/misbehaving_kernels.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>

#include "worker/misbehaving.hpp"

namespace fftune::test {
namespace {

/// In the middle of what is compiled.
void end_at_third() {
  static std::atomic<int> made{0};
  if (++made == 3) _exit(1);
}

}  // namespace

const std::vector<std::string>& kernel_ways() {
  static const std::vector<std::string> all{"illegal", "loop", "trap", "beyond", "wrong"};
  return all;
}

const SourceSet& misbehaving_sources() {
  // One thread an element of y; `way` is a place in kernel_ways(), past its end for a good one. Its
  // time is given by `microseconds`, so that nothing else decides the order.
  static const std::map<std::string, std::string> files{{"test/odd.cu", R"(
__device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
template <int way, int microseconds>
__global__ void odd(const float* x, const float* a, const float* b, float* y, int m, int d, int h) {
  const unsigned long long began = nanoseconds();
  const int i = threadIdx.x / d, j = threadIdx.x % d;
  if (i >= m) return;
  float sum = 0;
  for (int l = 0; l < h; ++l) {
    float hidden = 0;
    for (int k = 0; k < d; ++k) hidden += x[i * d + k] * a[l * d + k];
    sum += hidden * b[j * h + l];
  }
  y[i * d + j] = sum;
  while (nanoseconds() - began < microseconds * 1000ull) {}
  if (threadIdx.x != 1) return;
  if (way == 0) *reinterpret_cast<volatile int*>(64ll) = 1;
  if (way == 1)
    for (;;) asm volatile("nanosleep.u32 1000;");
  if (way == 2) asm volatile("trap;");
  if (way == 3) y[m * d + 3] = 1;
  if (way == 4) y[1] = sum + 1;
}
)"}};
  static const SourceSet sources(files);
  return sources;
}

Space MisbehavingKernels::space(const Problem&, const DeviceFacts&) const {
  std::vector<std::int64_t> values;
  for (int p = 0; p < misbehaving_kernels; ++p) values.push_back(p);
  return Space().parameter("p", "its place", values);
}

Program MisbehavingKernels::program(const Problem& problem, const DeviceFacts&,
                                    const Config& config) const {
  const int p = config.get("p");
  const auto& ways = kernel_ways();
  auto way = ways.size();
  if (misbehaves(p) && way_ == "mixed")
    way = static_cast<std::size_t>(p / 5) % ways.size();
  else if (misbehaves(p))
    way = static_cast<std::size_t>(std::find(ways.begin(), ways.end(), way_) - ways.begin());
  if (way_ == "vanishing" && p != 0) end_at_third();
  const int microseconds = p == misbehaving_kernels_best ? 100 : 200 + 5 * p;
  const auto m = static_cast<std::int32_t>(problem.size("m"));
  const auto d = static_cast<std::int32_t>(problem.size("d"));
  Program program;
  program.kernels.push_back({"test/odd.cu", fmt::format("odd<{}, {}>", way, microseconds)});
  KernelLaunch launch;
  launch.block = {static_cast<std::uint32_t>(m * d), 1, 1};
  launch.arguments = {TensorArgument{0},
                      TensorArgument{1},
                      TensorArgument{2},
                      TensorArgument{3},
                      m,
                      d,
                      static_cast<std::int32_t>(problem.size("h"))};
  program.steps.emplace_back(std::move(launch));
  return program;
}

}  // namespace fftune::test
