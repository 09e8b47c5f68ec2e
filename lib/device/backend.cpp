#include "device/backend.hpp"

#include <array>

#include "core/error.hpp"

namespace fftune {

int CompileReport::spill_bytes() const {
  int bytes = 0;
  for (const auto& kernel : kernels) bytes += kernel.spill_bytes;
  return bytes;
}

std::unique_ptr<SharedBuffer> Backend::allocate_shared(std::size_t) {
  throw Error(ErrorKind::unavailable, facts().name + " shares no memory with other processes");
}

std::unique_ptr<Buffer> Backend::open_shared(const SharedHandle&, std::size_t) {
  throw Error(ErrorKind::unavailable, facts().name + " shares no memory with other processes");
}

CommunicatorOptions::Id Backend::communicator_id() {
  throw Error(ErrorKind::unavailable, facts().name + " is no device of NCCL: it needs GPUs");
}

std::unique_ptr<Communicator> Backend::communicate(const CommunicatorOptions&) {
  throw Error(ErrorKind::unavailable, facts().name + " is no device of NCCL: it needs GPUs");
}

std::size_t Backend::workspace_bytes(const Program& program) const {
  constexpr std::size_t alignment = 256;
  std::size_t bytes = 0;
  for (const auto& scratch : program.scratch)
    bytes += (scratch.bytes + alignment - 1) / alignment * alignment;
  return bytes;
}

namespace {

constexpr std::size_t alignment = 256;
constexpr std::size_t most_tensors = 256;  // that an executable has: enqueue allocates nothing

}  // namespace

void PlacedExecutable::enqueue(void* const* tensors, void* workspace, void* stream) const {
  std::array<void*, most_tensors> own;
  if (places_.size() > own.size())
    throw Error(ErrorKind::internal, "an executable that is placed has too many tensors");
  // A program of one kind of layers has no tensors of the others.
  for (std::size_t i = 0; i < places_.size(); ++i)
    own[i] = places_[i] == nowhere ? nullptr : tensors[places_[i]];
  void* const part = static_cast<std::byte*>(workspace) + offset_;
  if (again_)
    executable_->enqueue_again(own.data(), part, stream);
  else
    executable_->enqueue(own.data(), part, stream);
}

std::vector<std::shared_ptr<const Executable>> repeated(
    const std::vector<std::shared_ptr<const Executable>>& executables,
    const std::vector<std::vector<std::size_t>>& places,
    const std::shared_ptr<const Executable>& first) {
  std::vector<std::shared_ptr<const Executable>> all;
  for (std::size_t time = 0; time < places.size(); ++time) {
    std::size_t offset = 0;
    for (const auto& executable : executables) {
      all.push_back(std::make_shared<PlacedExecutable>(all.empty() ? first : executable,
                                                       places[time], offset, time > 0));
      offset += (executable->workspace_bytes() + alignment - 1) / alignment * alignment;
    }
  }
  return all;
}

}  // namespace fftune
