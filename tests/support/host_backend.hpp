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
  void enqueue(void* const* tensors, void* workspace, void*) const override;

 private:
  Body body_;
  std::size_t workspace_bytes_;
  CompileReport report_;
};

class HostReplay final : public Replay {
 public:
  explicit HostReplay(std::function<void()> body) : body_(std::move(body)) {}
  double sample() override;

 private:
  std::function<void()> body_;
};

class HostBackend : public Backend {
 public:
  HostBackend();
  const DeviceFacts& facts() const override { return facts_; }

  /// Host functions alone; a program of anything else fails to compile.
  CompileResult compile(const Program& program) override;

  std::size_t free_bytes() const override { return limit; }
  std::unique_ptr<Buffer> allocate(std::size_t bytes) override;
  void write(void* device, const void* host, std::size_t bytes) override;
  void read(void* host, const void* device, std::size_t bytes) override;
  void copy(void* to, const void* from, std::size_t bytes) override;
  void fill(void* device, std::uint8_t byte, std::size_t bytes) override;
  void* stream() override { return nullptr; }
  void synchronize() override {}
  std::unique_ptr<Replay> capture(int passes,
                                  const std::function<void(int, void*)>& enqueue) override;
  Limits limits(DType) override { return {1e10, 1e10}; }

  std::size_t limit = std::size_t{1} << 30;  // of one allocation
  std::size_t written_bytes = 0;             // from the host, so far

 private:
  DeviceFacts facts_;
  HostThreads threads_;
};

}  // namespace fftune::test
