#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "cuda/device.hpp"
#include "support/catch.hpp"

namespace fftune::cuda {
namespace {

using testing::scale_program;
using testing::TestDevice;

}  // namespace

TEST_CASE("a captured sequence runs all its passes and takes a plausible time", "[gpu][timing]") {
  FFTUNE_DEVICE(TestDevice, device);
  auto& backend = *device.backend;
  constexpr std::int64_t count = std::int64_t{64} << 20;
  constexpr std::size_t bytes = std::size_t{4} * count;
  const auto from = backend.allocate(bytes);
  backend.fill(from->data(), 0, bytes);
  std::vector<std::unique_ptr<Buffer>> to;
  for (int i = 0; i < 3; ++i) {
    to.push_back(backend.allocate(bytes));
    backend.fill(to.back()->data(), 0xff, bytes);
  }
  const auto result = backend.compile(scale_program(count, 2.0f));
  REQUIRE(result.report.failure == "");
  const auto replay = backend.capture(3, [&](int pass, void* stream) {
    void* const tensors[] = {from->data(), to.at(static_cast<std::size_t>(pass))->data()};
    result.executable->enqueue(tensors, nullptr, stream);
  });
  double seconds = replay->sample();
  for (int i = 0; i < 10; ++i) seconds = std::min(seconds, replay->sample());
  const double bandwidth = 2.0 * static_cast<double>(bytes) / seconds;
  WARN("scale: " << bandwidth / 1e9 << " GB/s of " << backend.facts().memory_bandwidth / 1e9);
  CHECK(bandwidth > 0.2 * backend.facts().memory_bandwidth);
  CHECK(bandwidth < 1.1 * backend.facts().memory_bandwidth);
  for (const auto& buffer : to) {
    float last = -1;
    backend.read(&last, static_cast<float*>(buffer->data()) + count - 1, sizeof last);
    CHECK(last == 0.0f);
  }
}

TEST_CASE("a small launch is timed without the host's part", "[gpu][timing]") {
  FFTUNE_DEVICE(TestDevice, device);
  auto& backend = *device.backend;
  const auto x = device.upload(std::vector<float>(256, 1.0f));
  const auto y = backend.allocate(x->bytes());
  const auto result = backend.compile(scale_program(256, 2.0f));
  REQUIRE(result.report.failure == "");
  void* const tensors[] = {x->data(), y->data()};
  const auto replay = backend.capture(
      1, [&](int, void* stream) { result.executable->enqueue(tensors, nullptr, stream); });
  std::vector<double> samples;
  for (int i = 0; i < 50; ++i) samples.push_back(replay->sample());
  std::sort(samples.begin(), samples.end());
  WARN("one small launch: median " << samples[25] * 1e6 << " us, least " << samples[0] * 1e6);
  CHECK(samples[0] > 0);
  CHECK(samples[25] < 30e-6);
}

TEST_CASE("a capture that fails leaves the device as it was", "[gpu][timing]") {
  FFTUNE_DEVICE(TestDevice, device);
  auto& backend = *device.backend;
  CHECK_THROWS_AS(backend.capture(2, [](int, void*) { throw std::runtime_error("no"); }),
                  std::runtime_error);
  CHECK_THROWS_AS(backend.capture(0, [](int, void*) {}), Error);
  const auto x = device.upload({1.0f, 2.0f});
  CHECK(device.download<float>(*x) == std::vector<float>{1.0f, 2.0f});
  backend.synchronize();
}

TEST_CASE("two launches take at most 3 us of the host's time", "[gpu][timing]") {
  FFTUNE_DEVICE(TestDevice, device);
  auto& backend = *device.backend;
  const auto x = device.upload(std::vector<float>(256, 1.0f));
  const auto y = backend.allocate(x->bytes());
  auto program = scale_program(256, 2.0f);
  program.steps.push_back(program.steps.front());
  const auto result = backend.compile(program);
  REQUIRE(result.report.failure == "");
  void* const tensors[] = {x->data(), y->data()};
  using Clock = std::chrono::steady_clock;
  std::vector<double> seconds;
  for (int round = 0; round < 100; ++round) {
    constexpr int calls = 50;  // few enough that the driver's queue has room
    const auto start = Clock::now();
    for (int i = 0; i < calls; ++i) result.executable->enqueue(tensors, nullptr, backend.stream());
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count() / calls);
    backend.synchronize();
  }
  std::sort(seconds.begin(), seconds.end());
  WARN("two launches: median " << seconds[50] * 1e6 << " us, least " << seconds[0] * 1e6);
#ifdef NDEBUG
  CHECK(seconds[50] <= 3e-6);
#endif
}

TEST_CASE("the ceilings are below the datasheet and measured once", "[gpu][timing]") {
  FFTUNE_DEVICE(TestDevice, device);
  auto& backend = *device.backend;
  const auto limits = backend.limits(DType::bf16);
  WARN(limits.bytes_per_second / 1e12 << " TB/s, " << limits.flops_per_second / 1e12
                                      << " TFLOP/s: " << limits.method);
  CHECK(limits.method != "");
  CHECK(limits.bytes_per_second > 0.3 * backend.facts().memory_bandwidth);
  CHECK(limits.bytes_per_second < 1.1 * backend.facts().memory_bandwidth);
  CHECK(limits.flops_per_second > 1e12);
  CHECK(backend.limits(DType::bf16).flops_per_second == limits.flops_per_second);
}

}  // namespace fftune::cuda
