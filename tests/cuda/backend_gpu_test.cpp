#include <cstring>
#include <numeric>
#include <thread>

#include "cuda/device.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"

namespace fftune::cuda {
namespace {

using testing::one_launch;
using testing::scale_program;
using testing::TestDevice;

std::vector<float> ramp(std::size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), 1.0f);
  return values;
}

KernelLaunch& launch_of(Program& program) {
  return std::get<KernelLaunch>(program.steps.front());
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("device memory is written, read, copied and filled", "[gpu]") {
  FFTUNE_DEVICE(TestDevice, device);
  auto& backend = *device.backend;
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{3}, std::size_t{4097}, std::size_t{5} << 20}) {
    std::vector<std::uint8_t> values(bytes);
    for (std::size_t i = 0; i < bytes; ++i) values[i] = static_cast<std::uint8_t>(i * 7 + 1);
    const auto first = backend.allocate(bytes);
    const auto second = backend.allocate(bytes);
    CHECK(first->bytes() == bytes);
    CHECK(reinterpret_cast<std::uintptr_t>(first->data()) % 256 == 0);
    backend.write(first->data(), values.data(), bytes);
    backend.fill(second->data(), 0xab, bytes);
    CHECK(device.download<std::uint8_t>(*second) == std::vector<std::uint8_t>(bytes, 0xab));
    backend.copy(second->data(), first->data(), bytes);
    CHECK(device.download<std::uint8_t>(*second) == values);
  }
  backend.write(nullptr, nullptr, 0);
  CHECK(backend.allocate(0)->bytes() == 0);
  CHECK(backend.free_bytes() > 0);
  CHECK(backend.free_bytes() <= static_cast<std::size_t>(backend.facts().memory_bytes));
}

TEST_CASE("memory that is not there is refused with the bytes", "[gpu]") {
  FFTUNE_DEVICE(TestDevice, device);
  CHECK(contains(test::error_of(ErrorKind::unavailable,
                                [&] { device.backend->allocate(std::size_t{1} << 50); }),
                 "1125899906842624 bytes"));
  CHECK(device.backend->allocate(1024));
  device.backend->synchronize();
}

TEST_CASE("the facts of a device are in range", "[gpu]") {
  FFTUNE_DEVICE(TestDevice, device);
  const auto& facts = device.backend->facts();
  CHECK(facts.kind == DeviceKind::cuda);
  CHECK(facts.name != "");
  CHECK(facts.arch.rfind("sm_", 0) == 0);
  CHECK(facts.multiprocessors > 0);
  CHECK(facts.registers_per_multiprocessor == 65536);
  CHECK(facts.shared_bytes_per_block >= 48 * 1024);
  CHECK(facts.shared_bytes_per_multiprocessor > facts.shared_bytes_per_block);
  CHECK(facts.l2_bytes > 0);
  CHECK(facts.memory_bytes > std::int64_t{1} << 30);
  CHECK(facts.clock_hz > 5e8);
  CHECK(facts.memory_bandwidth > 5e10);
  CHECK(facts.memory_bandwidth < 5e13);
  CHECK(facts.toolkit != "");
  CHECK(facts.driver != "");
  for (const auto& [name, value] : facts.details) WARN(name << ": " << value);
}

TEST_CASE("a program runs", "[gpu]") {
  FFTUNE_DEVICE(TestDevice, device);
  auto& backend = *device.backend;
  const auto x = ramp(1000003);
  const auto from = device.upload(x);
  const auto to = backend.allocate(from->bytes());
  const auto result = backend.compile(scale_program(1000003, 2.0f));
  REQUIRE(result.report.failure == "");
  REQUIRE(result.executable);
  CHECK(result.executable->workspace_bytes() == 0);
  void* const tensors[] = {from->data(), to->data()};
  result.executable->enqueue(tensors, nullptr, backend.stream());
  backend.synchronize();
  const auto y = device.download<float>(*to);
  bool good = true;
  for (std::size_t i = 0; i < x.size(); ++i) good = good && y[i] == 2.0f * x[i];
  CHECK(good);
  const auto again = backend.compile(scale_program(17, 3.0f));
  CHECK(again.report.cached);
  CHECK(again.report.seconds == 0);
}

TEST_CASE("zeroed scratch is zero in every run", "[gpu]") {
  FFTUNE_DEVICE(TestDevice, device);
  auto& backend = *device.backend;
  auto program = one_launch("test/count.cu", "count<float>", {77, 1, 1}, {1, 1, 1},
                            {ScratchArgument{1}, TensorArgument{0}, std::int32_t{1000}});
  program.scratch = {{100, false}, {4, true}, {12, true}};
  const auto result = backend.compile(program);
  REQUIRE(result.report.failure == "");
  CHECK(result.executable->workspace_bytes() == 768);
  const auto workspace = backend.allocate(result.executable->workspace_bytes());
  const auto out = backend.allocate(4);
  void* const tensors[] = {out->data()};
  for (int run = 0; run < 3; ++run) {
    backend.fill(workspace->data(), 0xff, workspace->bytes());
    backend.fill(out->data(), 0xff, 4);
    result.executable->enqueue(tensors, workspace->data(), backend.stream());
    CHECK(device.download<float>(*out).at(0) == 1077.0f);
  }
  auto* const odd = static_cast<std::byte*>(workspace->data()) + 16;
  CHECK_THROWS_AS(result.executable->enqueue(tensors, odd, backend.stream()), Error);
  CHECK_THROWS_AS(result.executable->enqueue(tensors, nullptr, backend.stream()), Error);
}

TEST_CASE("an impossible launch is a result", "[gpu]") {
  FFTUNE_DEVICE(TestDevice, device);
  auto& backend = *device.backend;
  const auto failure_of = [&](const Program& program) {
    const auto result = backend.compile(program);
    CHECK(!result.executable);
    return result.report.failure;
  };
  const auto good = scale_program(100, 1.0f);
  auto program = good;
  launch_of(program).shared_bytes = 1 << 20;
  CHECK(contains(failure_of(program), "shared memory"));
  program = good;
  launch_of(program).block = {1025, 1, 1};
  CHECK(contains(failure_of(program), "block"));
  program = good;
  launch_of(program).grid = {0, 1, 1};
  CHECK(contains(failure_of(program), "grid"));
  program = good;
  launch_of(program).cluster = {3, 1, 1};
  CHECK(contains(failure_of(program), "cluster"));
  CHECK(contains(failure_of(one_launch("test/shared.cu", "bounded<64>", {1, 1, 1}, {128, 1, 1},
                                       {TensorArgument{0}})),
                 "64"));
  CHECK(contains(failure_of(one_launch("test/broken.cu", "broken<1>", {1, 1, 1}, {1, 1, 1}, {})),
                 "test/broken.cu:3"));
  program = good;
  program.steps.emplace_back(HostFunction([](const HostCall&) {}));
  CHECK(contains(failure_of(program), "host function"));
  program = good;
  launch_of(program).arguments.pop_back();
  const auto result = backend.compile(program);  // a driver before 12.4 cannot tell
  CHECK((result.executable || contains(result.report.failure, "arguments")));
  CHECK(backend.compile(good).executable);
}

TEST_CASE("programs that share a kernel ask for different shared memory", "[gpu]") {
  FFTUNE_DEVICE(TestDevice, device);
  auto& backend = *device.backend;
  const auto out = backend.allocate(4);
  void* const tensors[] = {out->data()};
  const auto program = [&](std::uint32_t bytes) {
    auto made =
        one_launch("test/shared.cu", "shared<4000>", {1, 1, 1}, {128, 1, 1}, {TensorArgument{0}});
    launch_of(made).shared_bytes = bytes;
    return backend.compile(made);
  };
  const auto most = static_cast<std::uint32_t>(backend.facts().shared_bytes_per_block);
  const auto large = program(most);
  const auto small = program(16000);
  REQUIRE(large.report.failure == "");
  REQUIRE(small.report.failure == "");
  for (const auto& executable : {small.executable, large.executable, small.executable}) {
    backend.fill(out->data(), 0, 4);
    executable->enqueue(tensors, nullptr, backend.stream());
    CHECK(device.download<std::int32_t>(*out).at(0) == 3999);
  }
}

TEST_CASE("clusters, programmatic launches and tensor maps arrive at the kernel", "[gpu]") {
  FFTUNE_DEVICE(TestDevice, device);
  auto& backend = *device.backend;
  if (backend.facts().compute_capability < 90) FFTUNE_SKIP("compute capability below 9.0");

  auto program =
      one_launch("test/cluster.cu", "cluster<2>", {4, 1, 1}, {32, 1, 1}, {TensorArgument{0}});
  launch_of(program).cluster = {2, 1, 1};
  launch_of(program).programmatic = true;
  const auto clusters = backend.compile(program);
  REQUIRE(clusters.report.failure == "");
  const auto ranks = backend.allocate(16);
  void* const rank_tensors[] = {ranks->data()};
  clusters.executable->enqueue(rank_tensors, nullptr, backend.stream());
  CHECK(device.download<std::int32_t>(*ranks) == std::vector<std::int32_t>{2, 3, 2, 3});

  // A matrix of 20 by 16: the box of 1 by 8 at row 19, column 12 reaches past its edge.
  const auto matrix = device.upload(ramp(320));
  const auto box = backend.allocate(8 * sizeof(float));
  TensorMapArgument map;
  map.matrix = TensorArgument{0};
  map.dtype = DType::f32;
  map.rows = 20;
  map.columns = 16;
  map.box_rows = 1;
  map.box_columns = 8;
  const auto copies =
      backend.compile(one_launch("test/tma.cu", "tma<8>", {1, 1, 1}, {32, 1, 1},
                                 {map, TensorArgument{1}, std::int32_t{12}, std::int32_t{19}}));
  REQUIRE(copies.report.failure == "");
  void* const map_tensors[] = {matrix->data(), box->data()};
  copies.executable->enqueue(map_tensors, nullptr, backend.stream());
  CHECK(device.download<float>(*box) ==
        std::vector<float>{317.0f, 318.0f, 319.0f, 320.0f, 0, 0, 0, 0});
}

TEST_CASE("threads compile and run at once, and keep their contexts", "[gpu]") {
  FFTUNE_DEVICE(TestDevice, device);
  auto& backend = *device.backend;
  constexpr std::size_t count = 10000;
  const auto from = device.upload(ramp(count));
  std::vector<float> lasts(4);
  std::vector<std::string> failures(4);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < lasts.size(); ++i)
    threads.emplace_back([&, i] {
      try {
        const auto to = backend.allocate(from->bytes());
        const auto by = static_cast<float>(i + 2);
        const auto result = backend.compile(scale_program(count, by));
        failures[i] = result.report.failure;
        void* const tensors[] = {from->data(), to->data()};
        // This thread has no context of its own yet.
        if (result.executable) result.executable->enqueue(tensors, nullptr, backend.stream());
        lasts[i] = device.download<float>(*to).back();
      } catch (const std::exception& error) {
        failures[i] = error.what();
      }
    });
  for (auto& thread : threads) thread.join();
  for (std::size_t i = 0; i < lasts.size(); ++i) {
    CHECK(failures[i] == "");
    CHECK(lasts[i] == static_cast<float>(count * (i + 2)));
  }
}

}  // namespace fftune::cuda
