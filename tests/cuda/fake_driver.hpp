// A driver without a device: libcuda's entry points over host memory, for the tests. Launches are
// recorded and not run; streams are in order because everything happens at once.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace fftune::testing {

struct FakeLaunch {
  std::array<unsigned, 3> grid{};
  std::array<unsigned, 3> block{};
  unsigned shared_bytes = 0;
  unsigned attributes = 0;
  std::vector<std::vector<unsigned char>> arguments;
  CUcontext current = nullptr;
};

struct FakeDriver {
  std::vector<std::size_t> parameter_bytes;  // of every kernel
  std::vector<FakeLaunch> launches;
  std::string failing_call;  // this call returns `failure`
  CUresult failure = CUDA_SUCCESS;
  int live_objects = 0;  // modules, memory, streams, events, graphs, contexts
  int open_captures = 0;
  std::size_t zeroed_bytes = 0;  // by the last cuMemsetD32Async
};

}  // namespace fftune::testing
