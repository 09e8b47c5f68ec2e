// A device that is not here: its programs are all compiled at once, to nothing.
#pragma once

#include <memory>
#include <utility>

#include "support/host_backend.hpp"

namespace fftune::test {

class AbsentBackend final : public HostBackend {
 public:
  explicit AbsentBackend(DeviceFacts facts) : facts_(std::move(facts)) {}
  const DeviceFacts& facts() const override { return facts_; }
  CompileResult compile(const Program& program) override {
    return {std::make_shared<HostExecutable>([](void* const*, void*) {}, workspace_bytes(program)),
            {}};
  }

 private:
  DeviceFacts facts_;
};

}  // namespace fftune::test
