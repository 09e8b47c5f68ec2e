// A backend of plain host memory that runs host functions, for tests of what needs any backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/error.hpp"
#include "device/backend.hpp"
#include "verify/host_threads.hpp"

namespace fftune::test {

class HostBuffer final : public Buffer {
 public:
  explicit HostBuffer(std::size_t bytes)
      : data_(std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256)), bytes_(bytes) {}
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  ~HostBuffer() override { std::free(data_); }
  void* data() const override { return data_; }
  std::size_t bytes() const override { return bytes_; }

 private:
  void* data_;
  std::size_t bytes_;
};

/// Runs `body` when it is enqueued.
class HostExecutable final : public Executable {
 public:
  using Body = std::function<void(void* const* tensors, void* workspace)>;

  explicit HostExecutable(Body body, std::size_t workspace_bytes = 0)
      : body_(std::move(body)), workspace_bytes_(workspace_bytes) {}
  const CompileReport& report() const override { return report_; }
  std::size_t workspace_bytes() const override { return workspace_bytes_; }
  void enqueue(void* const* tensors, void* workspace, void*) const override {
    body_(tensors, workspace);
  }

 private:
  Body body_;
  std::size_t workspace_bytes_;
  CompileReport report_;
};

class HostReplay final : public Replay {
 public:
  explicit HostReplay(std::function<void()> body) : body_(std::move(body)) {}
  double sample() override {
    body_();
    return 1e-6;
  }

 private:
  std::function<void()> body_;
};

class HostBackend : public Backend {
 public:
  HostBackend() {
    facts_.kind = DeviceKind::cpu;
    facts_.name = "Test CPU";
    facts_.arch = "test";
    facts_.multiprocessors = 1;
  }
  const DeviceFacts& facts() const override { return facts_; }

  /// Host functions alone; a program of anything else fails to compile.
  CompileResult compile(const Program& program) override {
    std::vector<HostFunction> functions;
    for (const auto& step : program.steps) {
      if (!std::holds_alternative<HostFunction>(step)) {
        CompileResult failed;
        failed.report.failure = "the test backend runs host functions alone";
        return failed;
      }
      functions.push_back(std::get<HostFunction>(step));
    }
    std::vector<std::size_t> offsets;
    std::size_t bytes = 0;
    for (const auto& scratch : program.scratch) {
      offsets.push_back(bytes);
      bytes += (scratch.bytes + 255) / 256 * 256;
    }
    const auto body = [functions, offsets, this](void* const* tensors, void* workspace) {
      std::vector<std::byte*> scratch;
      for (const auto offset : offsets)
        scratch.push_back(static_cast<std::byte*>(workspace) + offset);
      const HostCall call{tensors, scratch, threads_};
      for (const auto& function : functions) function(call);
    };
    return {std::make_shared<HostExecutable>(body, bytes), {}};
  }

  std::size_t free_bytes() const override { return limit; }
  std::unique_ptr<Buffer> allocate(std::size_t bytes) override {
    if (bytes > limit)
      throw Error(ErrorKind::unavailable, "needs " + std::to_string(bytes) + " bytes, " +
                                              std::to_string(limit) + " are free");
    return std::make_unique<HostBuffer>(bytes);
  }
  void write(void* device, const void* host, std::size_t bytes) override {
    written_bytes += bytes;
    std::memcpy(device, host, bytes);
  }
  void read(void* host, const void* device, std::size_t bytes) override {
    std::memcpy(host, device, bytes);
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void fill(void* device, std::uint8_t byte, std::size_t bytes) override {
    std::memset(device, byte, bytes);
  }
  void* stream() override { return nullptr; }
  void synchronize() override {}
  std::unique_ptr<Replay> capture(int passes,
                                  const std::function<void(int, void*)>& enqueue) override {
    return std::make_unique<HostReplay>([passes, enqueue] {
      for (int pass = 0; pass < passes; ++pass) enqueue(pass, nullptr);
    });
  }
  Limits limits(DType) override { return {1e10, 1e10}; }

  std::size_t limit = std::size_t{1} << 30;  // of one allocation
  std::size_t written_bytes = 0;             // from the host, so far

 private:
  DeviceFacts facts_;
  HostThreads threads_;
};

}  // namespace fftune::test
