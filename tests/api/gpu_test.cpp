// The C API on a CUDA device: results, graphs, several streams, and what a run costs the host.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "api/layer.hpp"
#include "core/dtype.hpp"
#include "registry/catalog.hpp"
#include "runtime/devices.hpp"
#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/seconds.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// cuda:0 for memory and streams, in the primary context that the library uses too.
struct Gpu {
  Environment environment = read_environment();
  std::unique_ptr<Backend> backend;
  std::string absence;

  Gpu() {
    const Devices devices = list_devices(environment);
    if (devices.found.front().spec == "cpu") {
      absence = "no CUDA device";
      for (const auto& reason : devices.unavailable) absence += "; " + reason;
      return;
    }
    backend = open_device("cuda:0", *builtin_catalog().sources, environment);
  }
};

std::unique_ptr<Buffer> workspace_of(Backend& backend, const library::Plan& plan) {
  return backend.allocate(std::max<std::size_t>(plan.workspace_bytes(), 256));
}

std::string bf16_json(std::size_t m, std::size_t d, std::size_t h) {
  return ffn_json(m, d, h, ",\"dtype\":\"bf16\"");
}

/// A layer in bf16 on the device, with its plan.
struct DeviceLayer {
  DeviceLayer(Backend& device, const library::Context& context, std::size_t m, std::size_t d,
              std::size_t h)
      : backend(&device),
        host(m, d, h),
        plan(context.plan(bf16_json(m, d, h))),
        workspace(workspace_of(device, plan)) {
    for (auto* values : {&host.x, &host.w_gate, &host.w_up, &host.w_down, &host.y}) {
      std::vector<std::uint16_t> half(values->size());
      encode(DType::bf16, *values, half.data());
      decode(DType::bf16, half.data(), *values);
      auto& buffer = memory.emplace_back(backend->allocate(half.size() * 2));
      backend->write(buffer->data(), half.data(), half.size() * 2);
      buffers.push_back(buffer->data());
    }
    backend->synchronize();
  }

  std::vector<std::uint16_t> bits(const void* y) const {
    std::vector<std::uint16_t> half(host.y.size());
    backend->read(half.data(), y, half.size() * 2);
    backend->synchronize();
    return half;
  }
  double error(const void* y) const {
    std::vector<float> out(host.y.size());
    decode(DType::bf16, bits(y).data(), out);
    return relative_error(out, host.expected());
  }

  Backend* backend;
  Layer host;
  library::Plan plan;
  std::unique_ptr<Buffer> workspace;
  std::vector<std::unique_ptr<Buffer>> memory;
  std::vector<void*> buffers;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TEST_CASE("ffn in bf16 runs through fftune.h on a CUDA device", "[gpu]") {
  Gpu gpu;
  if (!gpu.backend) FFTUNE_SKIP(gpu.absence);
  const library::Context context(0);
  // An even tile, a ragged one, one token, and rows that no vector load fits.
  for (const auto& [m, d, h] : {std::tuple<std::size_t, std::size_t, std::size_t>{64, 128, 256},
                                {77, 136, 264},
                                {1, 256, 512},
                                {9, 33, 71}}) {
    DeviceLayer layer(*gpu.backend, context, m, d, h);
    gpu.backend->fill(layer.buffers.back(), 0xff, layer.plan.buffer_bytes(4));
    layer.plan.run(layer.buffers.data(), layer.buffers.size(), layer.workspace->data(),
                   gpu.backend->stream());
    gpu.backend->synchronize();
    INFO(layer.plan.describe());
    CHECK(layer.error(layer.buffers.back()) < 3.5e-3);
  }
}

TEST_CASE("a run can be captured in a CUDA graph", "[gpu]") {
  Gpu gpu;
  if (!gpu.backend) FFTUNE_SKIP(gpu.absence);
  const library::Context context(0);
  DeviceLayer layer(*gpu.backend, context, 64, 128, 256);
  const auto replay = gpu.backend->capture(3, [&](int, void* stream) {
    layer.plan.run(layer.buffers.data(), layer.buffers.size(), layer.workspace->data(), stream);
  });
  gpu.backend->fill(layer.buffers.back(), 0xff, layer.plan.buffer_bytes(4));
  CHECK(replay->sample() > 0);
  gpu.backend->synchronize();
  CHECK(layer.error(layer.buffers.back()) < 3.5e-3);
}

TEST_CASE("two threads on two streams get the same bits", "[gpu]") {
  Gpu first;
  if (!first.backend) FFTUNE_SKIP(first.absence);
  Gpu second;  // a stream of its own in the same context
  const library::Context context(0);
  DeviceLayer layer(*first.backend, context, 200, 256, 512);
  std::vector<std::vector<std::uint16_t>> results(2);
  const auto work = [&](Backend& backend, std::vector<std::uint16_t>& result) {
    const auto workspace = workspace_of(backend, layer.plan);
    const auto y = backend.allocate(layer.plan.buffer_bytes(4));
    auto buffers = layer.buffers;
    buffers.back() = y->data();
    for (int i = 0; i < 50; ++i)
      layer.plan.run(buffers.data(), buffers.size(), workspace->data(), backend.stream());
    backend.synchronize();
    result.resize(layer.host.y.size());
    backend.read(result.data(), y->data(), result.size() * 2);
    backend.synchronize();
  };
  std::thread other([&] { work(*second.backend, results[1]); });
  work(*first.backend, results[0]);
  other.join();
  CHECK(results[0] == results[1]);
  CHECK(std::any_of(results[0].begin(), results[0].end(), [](auto bits) { return bits != 0; }));
}

TEST_CASE("a misaligned device buffer is refused before anything is launched", "[gpu]") {
  Gpu gpu;
  if (!gpu.backend) FFTUNE_SKIP(gpu.absence);
  const library::Context context(0);
  DeviceLayer layer(*gpu.backend, context, 64, 128, 256);
  auto buffers = layer.buffers;
  buffers[0] = static_cast<char*>(buffers[0]) + 2;
  CHECK(fftune_plan_run(layer.plan.get(), buffers.data(), 5, layer.workspace->data(), nullptr) ==
        FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("buffer 0 (x)"));
}

TEST_CASE("a run costs the host at most 3 us and no memory", "[gpu][timing]") {
  Gpu gpu;
  if (!gpu.backend) FFTUNE_SKIP(gpu.absence);
  const library::Context context(0);
  for (const std::size_t m : {1U, 64U}) {
    DeviceLayer layer(*gpu.backend, context, m, 128, 256);
    void* const stream = gpu.backend->stream();
    const auto run = [&] {
      return fftune_plan_run(layer.plan.get(), layer.buffers.data(), 5, layer.workspace->data(),
                             stream);
    };
    for (int i = 0; i < 100; ++i) REQUIRE(run() == FFTUNE_OK);
    gpu.backend->synchronize();
    // Short batches: a full launch queue would make the host wait for the device. Processor time,
    // since elapsed time also depends on other processes.
    const auto batch = [&] {
      const double spent = processor_seconds_of([&] {
        for (int i = 0; i < 100; ++i) run();
      });
      gpu.backend->synchronize();
      return spent * 1e6 / 100;
    };
    const auto before = allocations();
    batch();
    CHECK(allocations() == before);
    const double spent = least_time_of(3, batch, 51);
    WARN("fftune_plan_run, m=" << m << ": " << spent << " us of host time, "
                               << layer.plan.describe().substr(
                                      0, layer.plan.describe().find("preset")));
    CHECK(spent <= 3);
  }
}

TEST_CASE("a plan from a warm cache is there within 20 ms", "[gpu][timing]") {
  Gpu gpu;
  if (!gpu.backend) FFTUNE_SKIP(gpu.absence);
  { library::Context(0).plan(bf16_json(256, 512, 1024)); }
  const library::Context context(0);  // a fresh one: nothing is loaded, all is on disk
  const auto start = std::chrono::steady_clock::now();
  const auto plan = context.plan(bf16_json(256, 512, 1024));
  const double spent = seconds_since(start) * 1e3;
  WARN("fftune_plan_create from a warm cache: " << spent << " ms");
  CHECK(spent <= 20);
}
