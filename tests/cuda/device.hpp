// The device that the [gpu] tests use.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "cuda/kernels.hpp"
#include "cuda/open.hpp"
#include "device/backend.hpp"
#include "device/program.hpp"

namespace fftune::testing {

struct TestDevice {
  SourceSet sources = test_kernels();
  std::unique_ptr<Backend> backend;  // null if `missing` says why
  std::string missing;

  TestDevice() {
    try {
      backend = open_cuda(0, sources, {});
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unavailable) throw;
      missing = error.what();
    }
  }

  std::unique_ptr<Buffer> upload(const std::vector<float>& values) {
    auto buffer = backend->allocate(values.size() * sizeof(float));
    backend->write(buffer->data(), values.data(), buffer->bytes());
    return buffer;
  }

  template <typename T>
  std::vector<T> download(const Buffer& buffer) {
    std::vector<T> values(buffer.bytes() / sizeof(T));
    backend->read(values.data(), buffer.data(), values.size() * sizeof(T));
    return values;
  }
};

/// A program of one launch.
inline Program one_launch(const char* file, const char* expression, Dim3 grid, Dim3 block,
                          std::vector<Argument> arguments) {
  Program program;
  program.kernels.push_back({file, expression});
  KernelLaunch launch;
  launch.grid = grid;
  launch.block = block;
  launch.arguments = std::move(arguments);
  program.steps.emplace_back(std::move(launch));
  return program;
}

/// y = by * x over `count` elements; tensors x, y.
inline Program scale_program(std::int64_t count, float by) {
  constexpr std::int64_t threads = 256;
  const auto blocks = static_cast<std::uint32_t>((count + threads - 1) / threads);
  return one_launch("test/scale.cu", "scale<256>", {blocks, 1, 1}, {256, 1, 1},
                    {TensorArgument{0}, TensorArgument{1}, by, count});
}

}  // namespace fftune::testing
