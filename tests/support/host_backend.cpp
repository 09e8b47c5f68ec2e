#include "support/host_backend.hpp"

namespace fftune::test {

void HostExecutable::enqueue(void* const* tensors, void* workspace, void*) const {
  body_(tensors, workspace);
}

double HostReplay::sample() {
  body_();
  return 1e-6;
}

HostBackend::HostBackend() {
  facts_.kind = DeviceKind::cpu;
  facts_.name = "Test CPU";
  facts_.arch = "test";
  facts_.multiprocessors = 1;
}

CompileResult HostBackend::compile(const Program& program) {
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

std::unique_ptr<Buffer> HostBackend::allocate(std::size_t bytes) {
  if (bytes > limit)
    throw Error(ErrorKind::unavailable, "needs " + std::to_string(bytes) + " bytes, " +
                                            std::to_string(limit) + " are free");
  return std::make_unique<HostBuffer>(bytes);
}

void HostBackend::write(void* device, const void* host, std::size_t bytes) {
  written_bytes += bytes;
  std::memcpy(device, host, bytes);
}

void HostBackend::read(void* host, const void* device, std::size_t bytes) {
  std::memcpy(host, device, bytes);
}

void HostBackend::copy(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

void HostBackend::fill(void* device, std::uint8_t byte, std::size_t bytes) {
  std::memset(device, byte, bytes);
}

std::unique_ptr<Replay> HostBackend::capture(int passes,
                                             const std::function<void(int, void*)>& enqueue) {
  return std::make_unique<HostReplay>([passes, enqueue] {
    for (int pass = 0; pass < passes; ++pass) enqueue(pass, nullptr);
  });
}

}  // namespace fftune::test
