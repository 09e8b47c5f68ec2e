// An executable on other tensors: number i of its own is number places[i] of those it is given.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "device/backend.hpp"

namespace fftune {

class PlacedExecutable final : public Executable {
 public:
  PlacedExecutable(std::shared_ptr<const Executable> executable, std::vector<std::size_t> places)
      : executable_(std::move(executable)), places_(std::move(places)) {}

  const CompileReport& report() const override { return executable_->report(); }
  std::size_t workspace_bytes() const override { return executable_->workspace_bytes(); }
  void enqueue(void* const* tensors, void* workspace, void* stream) const override;

 private:
  std::shared_ptr<const Executable> executable_;
  std::vector<std::size_t> places_;
};

/// Each of `executables` once for each of `places`, all of them before they come again.
std::vector<std::shared_ptr<const Executable>> repeated(
    const std::vector<std::shared_ptr<const Executable>>& executables,
    const std::vector<std::vector<std::size_t>>& places);

}  // namespace fftune
