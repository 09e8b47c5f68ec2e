#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "cuda/device.hpp"
#include "support/catch.hpp"

namespace fftune::cuda {

using testing::one_launch;
using testing::TestDevice;

// A fault leaves the process's context lost for good, so this one has a process of its own.
TEST_CASE("child: a kernel writes where nothing is", "[.fault]") {
  FFTUNE_DEVICE(TestDevice, device);
  auto& backend = *device.backend;
  const auto out = backend.allocate(4);
  void* const tensors[] = {out->data()};
  const auto result = backend.compile(
      one_launch("test/fault.cu", "fault<64>", {1, 1, 1}, {1, 1, 1}, {TensorArgument{0}}));
  REQUIRE(result.report.failure == "");
  result.executable->enqueue(tensors, nullptr, backend.stream());
  try {
    backend.synchronize();
    FAIL("the fault went unnoticed");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::device_fault);
    CHECK(std::string(error.what()).find("CUDA_ERROR_ILLEGAL_ADDRESS") != std::string::npos);
  }
  CHECK_THROWS_AS(backend.synchronize(), Error);
  int value = 0;
  CHECK_THROWS_AS(backend.read(&value, out->data(), 4), Error);
}

TEST_CASE("a fault is an error in the driver's words, and destruction survives it", "[gpu]") {
  FFTUNE_DEVICE(TestDevice, device);
  const auto program = std::filesystem::read_symlink("/proc/self/exe").string();
  const auto command =
      "'" + program + "' 'child: a kernel writes where nothing is' > /dev/null 2>&1";
  const int status = std::system(command.c_str());
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

}  // namespace fftune::cuda
