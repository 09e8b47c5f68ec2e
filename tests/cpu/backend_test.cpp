#include "device/backend.hpp"

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "core/error.hpp"
#include "cpu/open.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "support/seconds.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// y[0] = x[0] + 1, by tensors {x, y}.
Program increment() {
  Program program;
  program.host_tensors = 2;
  program.steps.emplace_back(HostFunction([](const HostCall& call) {
    *static_cast<int*>(call.tensors[1]) = *static_cast<int*>(call.tensors[0]) + 1;
  }));
  return program;
}

/// The six elements of c by a program of this product alone.
std::vector<float> product(Backend& backend, const LibraryGemm& gemm, const std::vector<float>& a,
                           const std::vector<float>& b) {
  Program program;
  program.steps.emplace_back(gemm);
  const auto result = backend.compile(program);
  REQUIRE(result.executable);
  std::vector<float> a_bytes(a.size()), b_bytes(b.size()), c_bytes(6), c(6);
  encode(gemm.dtype, a, a_bytes.data());
  encode(gemm.dtype, b, b_bytes.data());
  std::array<void*, 3> tensors{};
  tensors.at(std::get<TensorArgument>(gemm.a).tensor) = a_bytes.data();
  tensors.at(std::get<TensorArgument>(gemm.b).tensor) = b_bytes.data();
  tensors.at(std::get<TensorArgument>(gemm.c).tensor) = c_bytes.data();
  const auto workspace = backend.allocate(result.executable->workspace_bytes());
  result.executable->enqueue(tensors.data(), workspace->data(), nullptr);
  decode(gemm.dtype, c_bytes.data(), c);
  return c;
}

}  // namespace

TEST_CASE("buffers are aligned, and hold what is written, copied and filled") {
  const auto backend = open_cpu();
  for (const std::size_t bytes : {0, 1, 255, 4096, 5 << 20}) {
    const auto buffer = backend->allocate(bytes);
    REQUIRE(buffer->bytes() == bytes);
    REQUIRE(reinterpret_cast<std::uintptr_t>(buffer->data()) % 256 == 0);
    const auto other = backend->allocate(bytes);
    std::vector<unsigned char> data(bytes, 7), back(bytes);
    backend->write(buffer->data(), data.data(), bytes);
    backend->copy(other->data(), buffer->data(), bytes);
    backend->fill(buffer->data(), 9, bytes);
    backend->read(back.data(), other->data(), bytes);
    REQUIRE(back == data);
    backend->read(back.data(), buffer->data(), bytes);
    REQUIRE(back == std::vector<unsigned char>(bytes, 9));
  }
}

TEST_CASE("a small buffer does not ask the system for its memory each time") {
  const auto backend = open_cpu();
  constexpr int count = 2000;
  const auto seconds = [](const auto& body) {
    return processor_seconds_of([&] {
      for (int i = 0; i < count; ++i) body();
    });
  };
  const auto share = [&] {
    return seconds([&] { backend->allocate(4096); }) / seconds([&] { backend->free_bytes(); });
  };
  CHECK(least_of(0.25, share) < 0.25);
}

TEST_CASE("a large buffer that is gone serves the next large one that it fits") {
  constexpr std::size_t mib = std::size_t{1} << 20;
  const auto backend = open_cpu();
  void* place = nullptr;
  {
    const auto first = backend->allocate(256 * mib);
    place = first->data();
    backend->fill(place, 1, first->bytes());
  }
  const auto small = backend->allocate(4 * mib);
  CHECK(small->data() != place);
  const auto second = backend->allocate(100 * mib);
  CHECK(second->data() == place);
  CHECK(second->bytes() == 100 * mib);
  const auto third = backend->allocate(100 * mib);  // at the same time
  CHECK(third->data() != place);
  backend->fill(second->data(), 2, second->bytes());
  backend->fill(third->data(), 3, third->bytes());
  CHECK(static_cast<const char*>(second->data())[100 * mib - 1] == 2);
}

TEST_CASE("memory that is not there is refused with the bytes needed and there") {
  const auto backend = open_cpu();
  const std::size_t bytes = std::size_t{1} << 50;
  const std::string message =
      test::error_of(ErrorKind::unavailable, [&] { backend->allocate(bytes); });
  REQUIRE(message.find("a buffer needs 1024 TiB of memory on ") == 0);
  REQUIRE(message.find(" are there: use smaller sizes") != std::string::npos);
}

TEST_CASE("a program that a CPU cannot run is a failed compilation") {
  const auto backend = open_cpu();
  Program kernel;
  kernel.steps.emplace_back(KernelLaunch{});
  Program half;
  half.steps.emplace_back(
      LibraryGemm{.dtype = DType::fp16, .m = 1, .n = 1, .k = 1, .a = {}, .b = {}, .c = {}});
  Program unsaid = increment();
  unsaid.host_tensors = 0;
  for (const auto& program : {kernel, half, unsaid}) {
    const auto result = backend->compile(program);
    REQUIRE(result.executable == nullptr);
    REQUIRE(result.report.failure.find("step 0") == 0);
  }
}

TEST_CASE("host functions see tensors, scratch and threads") {
  const auto backend = open_cpu();
  Program program;
  program.host_tensors = 1;
  program.scratch = {{.bytes = 100, .zeroed = false}, {.bytes = 8, .zeroed = true}};
  program.steps.emplace_back(HostFunction([](const HostCall& call) {
    std::memset(call.scratch[0], 1, 100);
    REQUIRE(reinterpret_cast<std::uintptr_t>(call.scratch[1]) % 256 == 0);
    std::int64_t zero = -1;
    std::memcpy(&zero, call.scratch[1], sizeof zero);
    *static_cast<std::int64_t*>(call.tensors[0]) = zero + call.parallel.max_threads();
    std::memset(call.scratch[1], 1, 8);
  }));
  const auto result = backend->compile(program);
  REQUIRE(result.executable);
  REQUIRE(result.executable->workspace_bytes() == 512);
  const auto workspace = backend->allocate(512);
  std::int64_t out = 0;
  void* tensors[] = {&out};
  for (int run = 0; run < 2; ++run) {
    result.executable->enqueue(tensors, workspace->data(), nullptr);
    REQUIRE(out == backend->facts().multiprocessors);
  }
}

TEST_CASE("library products, in f32 and in bf16") {
  const auto backend = open_cpu();
  for (const auto dtype : {DType::f32, DType::bf16}) {
    const LibraryGemm gemm{.dtype = dtype,
                           .m = 2,
                           .n = 3,
                           .k = 2,
                           .a = TensorArgument{2},
                           .b = TensorArgument{0},
                           .c = TensorArgument{1}};
    CHECK(product(*backend, gemm, {1, 2, 3, 4}, {5, 6, 7, 8, 9, 10}) ==
          std::vector<float>{17, 23, 29, 39, 53, 67});
  }
}

TEST_CASE("library products in a batch, of one first operand and several others") {
  const auto backend = open_cpu();
  for (const auto dtype : {DType::f32, DType::bf16}) {
    const LibraryGemm gemm{.dtype = dtype,
                           .m = 1,
                           .n = 2,
                           .k = 2,
                           .a = TensorArgument{0},
                           .b = TensorArgument{1},
                           .c = TensorArgument{2},
                           .batch = {.count = 3, .a = 0, .b = 4, .c = 2}};
    CHECK(product(*backend, gemm, {1, 2}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}) ==
          std::vector<float>{5, 11, 17, 23, 29, 35});
  }
}

TEST_CASE("a capture keeps its calls, by value, and runs them at each sample") {
  const auto backend = open_cpu();
  const auto executable = backend->compile(increment()).executable;
  std::array<int, 4> values{10, 0, 0, 0};
  const auto replay = backend->capture(3, [&](int pass, void* stream) {
    const auto at = static_cast<std::size_t>(pass);
    void* tensors[] = {&values[at], &values[at + 1]};
    executable->enqueue(tensors, nullptr, stream);
  });
  REQUIRE(values == std::array<int, 4>{10, 0, 0, 0});
  REQUIRE(replay->sample() >= 0);
  REQUIRE(values == std::array<int, 4>{10, 11, 12, 13});
  values[0] = 20;
  replay->sample();
  REQUIRE(values[3] == 23);

  REQUIRE_THROWS_AS(backend->capture(1, [](int, void*) { throw Error(ErrorKind::internal, "no"); }),
                    Error);
  void* tensors[] = {&values[0], &values[3]};
  executable->enqueue(tensors, nullptr, nullptr);  // not kept by the capture that failed
  REQUIRE(values[3] == 21);
}

TEST_CASE("several threads enqueue at once") {
  const auto backend = open_cpu();
  const auto executable = backend->compile(increment()).executable;
  std::array<int, 4> results{};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < results.size(); ++i)
    threads.emplace_back([&, i] {
      for (int round = 0; round < 500; ++round) {
        void* tensors[] = {&results[i], &results[i]};
        executable->enqueue(tensors, nullptr, nullptr);
      }
    });
  for (auto& thread : threads) thread.join();
  REQUIRE(results == std::array<int, 4>{500, 500, 500, 500});
}

TEST_CASE("the ceilings are measured once", "[timing]") {
  const auto backend = open_cpu();
  const auto limits = backend->limits(DType::f32);
  REQUIRE(limits.bytes_per_second > 1e8);
  REQUIRE(limits.flops_per_second > 1e8);
  REQUIRE(!limits.method.empty());
  REQUIRE(backend->limits(DType::bf16).flops_per_second == limits.flops_per_second);
}
