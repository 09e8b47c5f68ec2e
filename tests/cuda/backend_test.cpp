// The backend over a driver without a device: what it asks of the driver, and what it makes of its
// answers.
#include "cuda/backend.hpp"

#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/error.hpp"
#include "cuda/device.hpp"
#include "cuda/facts.hpp"
#include "cuda/fake_driver.hpp"
#include "cuda/fake_nccl.hpp"
#include "cuda/shared_library.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"

namespace fftune::cuda {
namespace {

using testing::FakeDriver;
using testing::FakeLaunch;
using testing::one_launch;
using testing::scale_program;

struct FakeDevice {
  FakeDriver* driver = nullptr;
  SourceSet sources = testing::test_kernels();
  std::unique_ptr<Backend> backend;
  std::string missing;

  FakeDevice() {
    FakeDriver* (*fake_driver)() = nullptr;
    SharedLibrary::open(FFTUNE_FAKE_DRIVER)->load(fake_driver, "fake_driver");
    driver = fake_driver();
    *driver = {};
    driver->parameter_bytes = {8, 8, 4, 8};  // of the kernel `scale`
    const auto entry_points = open_driver(FFTUNE_FAKE_DRIVER);
    std::shared_ptr<const Nvrtc> nvrtc;
    try {
      nvrtc = open_nvrtc({});
    } catch (const Error& error) {
      missing = error.what();
      return;
    }
    backend = std::make_unique<CudaBackend>(
        std::make_shared<const Context>(entry_points, 0), compiled_by(nvrtc, {}),
        read_facts(*entry_points, 0, nvrtc->version()), sources,
        CudaOptions{.cache_folder = {}, .toolkit_folders = {}, .nccl = FFTUNE_FAKE_NCCL});
  }
};

template <typename T>
T value_of(const FakeLaunch& launch, std::size_t argument) {
  T value{};
  REQUIRE(launch.arguments.at(argument).size() >= sizeof value);
  std::memcpy(&value, launch.arguments[argument].data(), sizeof value);
  return value;
}

}  // namespace

TEST_CASE("facts come from the driver's attributes") {
  FFTUNE_DEVICE(FakeDevice, device);
  const auto& facts = device.backend->facts();
  CHECK(facts.name == "Fake H200");
  CHECK(facts.arch == "sm_90a");
  CHECK(facts.shared_bytes_per_block == 232448);
  CHECK(facts.memory_bandwidth == 4916736000000.0);  // 2 * 3.201 GHz * 6144 bits
  CHECK(facts.clock_hz == 1.98e9);
  CHECK(architecture_name(80) == "sm_80");
  CHECK(architecture_name(100) == "sm_100a");
  CHECK(architecture_name(120) == "sm_120a");
}

TEST_CASE("a launch's arguments arrive in order") {
  FFTUNE_DEVICE(FakeDevice, device);
  auto program = scale_program(1000, 2.5f);
  program.scratch = {{100, false}, {10, true}, {300, true}};
  auto& launch = std::get<KernelLaunch>(program.steps[0]);
  launch.arguments[0] = ScratchArgument{0};
  launch.shared_bytes = 5000;
  launch.cluster = {2, 1, 1};
  launch.programmatic = true;
  const auto result = device.backend->compile(program);
  REQUIRE(result.report.failure == "");
  CHECK(result.executable->workspace_bytes() == 256 + 512 + 256);
  const auto workspace = device.backend->allocate(result.executable->workspace_bytes());
  device.backend->fill(workspace->data(), 0xff, workspace->bytes());
  int second = 0;
  void* const tensors[] = {nullptr, &second};
  result.executable->enqueue(tensors, workspace->data(), device.backend->stream());

  REQUIRE(device.driver->launches.size() == 1);
  const auto& seen = device.driver->launches[0];
  CHECK(seen.grid == std::array<unsigned, 3>{4, 1, 1});
  CHECK(seen.block == std::array<unsigned, 3>{256, 1, 1});
  CHECK(seen.shared_bytes == 5000);
  CHECK(seen.attributes == 2);
  CHECK(value_of<std::byte*>(seen, 0) == static_cast<std::byte*>(workspace->data()) + 768);
  CHECK(value_of<void*>(seen, 1) == &second);
  CHECK(value_of<float>(seen, 2) == 2.5f);
  CHECK(value_of<std::int64_t>(seen, 3) == 1000);
  CHECK(device.driver->zeroed_bytes == 768);
  const auto* bytes = static_cast<const std::uint8_t*>(workspace->data());
  CHECK(bytes[0] == 0);
  CHECK(bytes[767] == 0);
  CHECK(bytes[768] == 0xff);
}

TEST_CASE("a tensor map carries the address of the run") {
  FFTUNE_DEVICE(FakeDevice, device);
  device.driver->parameter_bytes = {4, sizeof(CUtensorMap), 8};
  const TensorMapArgument map{
      .matrix = TensorArgument{1}, .rows = 10, .columns = 64, .box_rows = 8, .box_columns = 64};
  auto program = one_launch("test/scale.cu", "scale<32>", {1, 1, 1}, {32, 1, 1},
                            {std::int32_t{-3}, map, TensorArgument{0}});
  const auto result = device.backend->compile(program);
  REQUIRE(result.report.failure == "");
  alignas(16) char first[16];
  alignas(16) char second[16];
  for (char* matrix : {second, first}) {
    void* const tensors[] = {first, matrix};
    result.executable->enqueue(tensors, nullptr, device.backend->stream());
    const auto& seen = device.driver->launches.back();
    CHECK(value_of<std::int32_t>(seen, 0) == -3);
    const auto encoded = value_of<CUtensorMap>(seen, 1);
    CHECK(encoded.opaque[0] == reinterpret_cast<cuuint64_t>(matrix));
    CHECK(encoded.opaque[1] == 77);
    CHECK(value_of<char*>(seen, 2) == first);
  }
  std::get<TensorMapArgument>(std::get<KernelLaunch>(program.steps[0]).arguments[1]).box_columns =
      7;
  CHECK(device.backend->compile(program).report.failure.find("box of 14 bytes") !=
        std::string::npos);
}

TEST_CASE("a sum by NCCL gets the addresses of the run, on its stream") {
  FFTUNE_DEVICE(FakeDevice, device);
  testing::FakeNccl* (*fake)() = nullptr;
  SharedLibrary::open(FFTUNE_FAKE_NCCL)->load(fake, "fftune_fake_nccl");
  fake()->sums.clear();
  Program program;
  program.scratch = {{100, false}, {300, false}};
  program.steps = {
      LibrarySum{DType::fp16, 40, TensorArgument{0, 16}, ScratchArgument{1, 8}, TensorArgument{1}}};
  const auto result = device.backend->compile(program);
  REQUIRE(result.report.failure == "");
  const auto workspace = device.backend->allocate(result.executable->workspace_bytes());
  std::array<std::byte, 256> x{};
  int group = 0, stream = 0;
  void* const tensors[] = {x.data(), &group};
  const auto run = [&] { result.executable->enqueue(tensors, workspace->data(), &stream); };
  CHECK_THROWS_WITH(run(), ContainsSubstring("make the group with nccl"));
  const auto communicator = device.backend->communicate(
      {.id = device.backend->communicator_id(),
       .group = &group,
       .deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5),
       .gives_up = nullptr});
  run();
  REQUIRE(fake()->sums.size() == 1);
  const auto& sum = fake()->sums[0];
  CHECK(sum.from == x.data() + 16);
  CHECK(sum.to == static_cast<std::byte*>(workspace->data()) + 256 + 8);
  CHECK(sum.elements == 40);
  CHECK(sum.type == 6);
  CHECK(sum.stream == &stream);
}

TEST_CASE("a struct of parameters has its fields at their offsets and zeros elsewhere") {
  FFTUNE_DEVICE(FakeDevice, device);
  device.driver->parameter_bytes = {320};
  const TensorMapArgument map{.matrix = TensorArgument{1},
                              .rows = 10,
                              .columns = 64,
                              .box_rows = 8,
                              .box_columns = 64,
                              .matrices = 3};
  auto program = one_launch("test/scale.cu", "scale<32>", {1, 1, 1}, {32, 1, 1}, {});
  auto& launch = std::get<KernelLaunch>(program.steps[0]);
  launch.parameters = {320, {{64, map}, {200, TensorArgument{0}}, {212, std::int32_t{-3}}}};
  const auto result = device.backend->compile(program);
  REQUIRE(result.report.failure == "");
  alignas(16) char first[16], second[16];
  for (char* matrix : {second, first}) {
    void* const tensors[] = {first, matrix};
    result.executable->enqueue(tensors, nullptr, device.backend->stream());
    const auto& bytes = device.driver->launches.back().arguments.at(0);
    REQUIRE(bytes.size() == 320);
    const auto at = [&](auto& value, std::size_t offset) {
      std::memcpy(&value, bytes.data() + offset, sizeof value);
    };
    CUtensorMap encoded;
    at(encoded, 64);
    CHECK(encoded.opaque[0] == reinterpret_cast<cuuint64_t>(matrix));
    char* pointer = nullptr;
    at(pointer, 200);
    CHECK(pointer == first);
    std::int32_t number = 0;
    at(number, 212);
    CHECK(number == -3);
    for (const std::size_t zero : {0, 63, 192, 208, 216, 319}) CHECK(bytes[zero] == 0);
  }
  launch.parameters->fields[0].offset = 72;
  CHECK_THROWS_AS(device.backend->compile(program), Error);
  launch.parameters->fields[0].offset = 256;
  CHECK_THROWS_AS(device.backend->compile(program), Error);
  launch.parameters = {328, {}};
  CHECK(device.backend->compile(program).report.failure ==
        "scale<32>: argument 0 (from 0) has 328 bytes, but the kernel takes 320");
}

TEST_CASE("arguments that the kernel does not take are a failure") {
  FFTUNE_DEVICE(FakeDevice, device);
  auto program = scale_program(100, 1.0f);
  auto& arguments = std::get<KernelLaunch>(program.steps[0]).arguments;
  arguments.back() = std::int32_t{100};
  CHECK(device.backend->compile(program).report.failure ==
        "scale<256>: argument 3 (from 0) has 4 bytes, but the kernel takes 8");
  arguments.pop_back();
  CHECK(device.backend->compile(program).report.failure ==
        "scale<256>: 3 arguments given, but the kernel takes more");
}

TEST_CASE("the context before a call is the context after it") {
  FFTUNE_DEVICE(FakeDevice, device);
  const auto driver = open_driver(FFTUNE_FAKE_DRIVER);
  const auto program = scale_program(100, 1.0f);
  const auto current = [&] {
    CUcontext context = nullptr;
    driver->ctx_get_current(&context);
    return context;
  };
  int mine = 0;
  for (auto* before : {static_cast<CUcontext>(nullptr), reinterpret_cast<CUcontext>(&mine)})
    std::thread([&] {
      driver->ctx_set_current(before);
      float value = 0;
      const auto x = device.backend->allocate(sizeof value);
      device.backend->write(x->data(), &value, sizeof value);
      device.backend->read(&value, x->data(), sizeof value);
      device.backend->synchronize();
      const auto executable = device.backend->compile(program).executable;
      void* const tensors[] = {x->data(), x->data()};
      const auto replay = device.backend->capture(
          2, [&](int, void* stream) { executable->enqueue(tensors, nullptr, stream); });
      CHECK(std::abs(replay->sample() - 3e-3) < 1e-8);
      CHECK_THROWS_AS(
          device.backend->capture(1, [](int, void*) { throw std::runtime_error("no"); }),
          std::runtime_error);
      CHECK(current() == before);
      // A launch outside of a capture takes the context that is there, or else the primary one.
      executable->enqueue(tensors, nullptr, device.backend->stream());
      CHECK(device.driver->launches.back().current != nullptr);
      if (before != nullptr) CHECK(device.driver->launches.back().current == before);
    }).join();
  CHECK(device.driver->open_captures == 0);
}

TEST_CASE("after any failure everything that was made is destroyed") {
  FFTUNE_DEVICE(FakeDevice, device);
  for (const char* call :
       {"cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel",
        "cuStreamSynchronize", "cuStreamCreate", "cuStreamEndCapture", "cuGraphInstantiate",
        "cuEventCreate", "cuGraphLaunch", "cuEventQuery"}) {
    INFO(call);
    const int before = device.driver->live_objects;
    device.driver->failing_call = call;
    device.driver->failure = CUDA_ERROR_ILLEGAL_ADDRESS;
    bool failed = false;
    try {
      auto program = scale_program(100, 1.0f);
      std::get<KernelLaunch>(program.steps[0]).shared_bytes = 60000;
      const auto result = device.backend->compile(program);
      const auto x = device.backend->allocate(400);
      void* const tensors[] = {x->data(), x->data()};
      const auto replay = device.backend->capture(
          1, [&](int, void* stream) { result.executable->enqueue(tensors, nullptr, stream); });
      replay->sample();
    } catch (const Error& error) {
      failed = true;
      CHECK(error.kind() == ErrorKind::device_fault);
      CHECK(std::string(error.what()).find("a fake error (CUDA_ERROR_FAKE)") != std::string::npos);
    }
    CHECK(failed);
    CHECK(device.driver->open_captures == 0);
    device.driver->failing_call.clear();
    // The delay kernel stays loaded once it is.
    CHECK(device.driver->live_objects <= before + 1);
  }
  device.backend.reset();
  CHECK(device.driver->live_objects == 0);
}

TEST_CASE("an image that the driver refuses is a failed candidate") {
  FFTUNE_DEVICE(FakeDevice, device);
  device.driver->failing_call = "cuModuleLoadData";
  device.driver->failure = CUDA_ERROR_NO_BINARY_FOR_GPU;
  const auto result = device.backend->compile(scale_program(100, 1.0f));
  CHECK(!result.executable);
  CHECK(result.report.failure.find("scale<256>: CUDA: cuModuleLoadData") == 0);
  device.driver->failing_call.clear();
  CHECK(device.backend->compile(scale_program(100, 1.0f)).executable);
}

TEST_CASE("objects that outlive the backend still work") {
  FFTUNE_DEVICE(FakeDevice, device);
  auto buffer = device.backend->allocate(64);
  auto executable = device.backend->compile(scale_program(10, 1.0f)).executable;
  void* const stream = device.backend->stream();
  device.backend.reset();
  void* const tensors[] = {buffer->data(), buffer->data()};
  executable->enqueue(tensors, nullptr, stream);
  executable.reset();
  buffer.reset();
  CHECK(device.driver->live_objects == 0);
}

TEST_CASE("a driver that is missing or does not start says so") {
  const auto complaint = [](const char* library) {
    return test::error_of(ErrorKind::unavailable, [&] { open_driver(library); });
  };
  CHECK(complaint("libcuda-not-here.so.1") ==
        "CUDA: libcuda-not-here.so.1 is not there: install the NVIDIA driver");
  CHECK_THROWS_AS(open_driver("libc.so.6"), Error);
  const FakeDevice device;
  device.driver->failing_call = "cuInit";
  device.driver->failure = CUDA_ERROR_NO_DEVICE;
  CHECK(complaint(FFTUNE_FAKE_DRIVER).find("a fake error") != std::string::npos);
  device.driver->failing_call.clear();
  const auto driver = open_driver(FFTUNE_FAKE_DRIVER);
  CHECK_THROWS_AS(Context(driver, 7), Error);
}

TEST_CASE("memory of a rank of this process on the same GPU is refused, that of a process opens") {
  FFTUNE_DEVICE(FakeDevice, device);
  const int before = device.driver->live_objects;
  {
    const auto own = device.backend->allocate_shared(64);
    CHECK_THROWS_WITH(device.backend->open_shared(own->handle(), 64),
                      ContainsSubstring("two ranks of this process are on GPU") &&
                          ContainsSubstring("give each a GPU of its own, or a process"));
    // Also where that rank has given up, and its memory is gone.
    SharedHandle of_gone = own->handle();
    ++of_gone.key;
    CHECK_THROWS_WITH(device.backend->open_shared(of_gone, 64),
                      ContainsSubstring("two ranks of this process are on GPU"));
    std::copy_n("elsewhere", 10, of_gone.device.begin());
    CHECK_THROWS_WITH(device.backend->open_shared(of_gone, 64),
                      ContainsSubstring("gave up while the group was made"));
    SharedHandle of_process = own->handle();
    ++of_process.process;
    CHECK(device.backend->open_shared(of_process, 64)->data() == own->data());
  }
  CHECK(device.driver->live_objects == before);
}

}  // namespace fftune::cuda
