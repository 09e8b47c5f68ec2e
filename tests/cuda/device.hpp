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
#include "support/catch.hpp"

namespace fftune::testing {

/// Defines a device of a type that has a backend; the test case is skipped where that is missing.
#define FFTUNE_DEVICE(Type, device) \
  Type device;                      \
  if (!device.backend) FFTUNE_SKIP(device.missing)

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
Program one_launch(const char* file, const char* expression, Dim3 grid, Dim3 block,
                   std::vector<Argument> arguments);

/// y = by * x over `count` elements; tensors x, y.
Program scale_program(std::int64_t count, float by);

}  // namespace fftune::testing
