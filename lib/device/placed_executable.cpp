#include "device/placed_executable.hpp"

#include <array>

#include "core/error.hpp"

namespace fftune {
namespace {

constexpr std::size_t most_tensors = 128;  // that an executable has: enqueue allocates nothing

}  // namespace

void PlacedExecutable::enqueue(void* const* tensors, void* workspace, void* stream) const {
  std::array<void*, most_tensors> own;
  if (places_.size() > own.size())
    throw Error(ErrorKind::internal, "an executable that is placed has too many tensors");
  for (std::size_t i = 0; i < places_.size(); ++i) own[i] = tensors[places_[i]];
  executable_->enqueue(own.data(), workspace, stream);
}

std::vector<std::shared_ptr<const Executable>> repeated(
    const std::vector<std::shared_ptr<const Executable>>& executables,
    const std::vector<std::vector<std::size_t>>& places) {
  std::vector<std::shared_ptr<const Executable>> all;
  for (const auto& of_one : places)
    for (const auto& executable : executables)
      all.push_back(std::make_shared<PlacedExecutable>(executable, of_one));
  return all;
}

}  // namespace fftune
