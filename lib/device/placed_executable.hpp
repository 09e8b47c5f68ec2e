// An executable on other tensors, number i of its own being number places[i] of those it is given,
// and on a part of the workspace.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "device/backend.hpp"

namespace fftune {

class PlacedExecutable final : public Executable {
 public:
  /// `offset`: of its part, 256-byte aligned. `again`: it has run there before.
  PlacedExecutable(std::shared_ptr<const Executable> executable, std::vector<std::size_t> places,
                   std::size_t offset, bool again)
      : executable_(std::move(executable)),
        places_(std::move(places)),
        offset_(offset),
        again_(again) {}

  const CompileReport& report() const override { return executable_->report(); }
  std::size_t workspace_bytes() const override { return offset_ + executable_->workspace_bytes(); }
  void enqueue(void* const* tensors, void* workspace, void* stream) const override;

 private:
  std::shared_ptr<const Executable> executable_;
  std::vector<std::size_t> places_;
  std::size_t offset_;
  bool again_;
};

/// Each of `executables` once for each of `places`, all of them before they come again. Each has a
/// part of the workspace to itself, so that it is there as the time before has left it. `first`
/// takes the place of the first one in the first time.
std::vector<std::shared_ptr<const Executable>> repeated(
    const std::vector<std::shared_ptr<const Executable>>& executables,
    const std::vector<std::vector<std::size_t>>& places,
    const std::shared_ptr<const Executable>& first);

}  // namespace fftune
