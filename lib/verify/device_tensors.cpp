#include "verify/device_tensors.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "verify/comparison.hpp"

namespace fftune {
namespace {

constexpr std::size_t window_bytes = std::size_t{1} << 20;
constexpr std::size_t windows = 32;

}  // namespace

DeviceTensors::DeviceTensors(Backend& backend, Truth& truth, Parallel& parallel)
    : backend_(&backend),
      truth_(&truth),
      parallel_(&parallel),
      workspace_(backend),
      addresses_(truth.tensors().size()),
      provided_(truth.tensors().size()) {
  for (std::size_t i = 0; i < truth.tensors().size(); ++i) buffers_.emplace_back(backend);
  workspace_.resize(0);
}

void DeviceTensors::fit() {
  const auto& tensors = truth_->tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (buffers_[i].allocated() && buffers_[i].bytes() == tensors[i].bytes()) continue;
    buffers_[i].resize(tensors[i].bytes());
    addresses_[i] = buffers_[i].data();
    provided_[i] = false;
  }
}

void DeviceTensors::provide(std::size_t tensor) {
  if (provided_[tensor]) return;
  upload(tensor);
  provided_[tensor] = true;
}

void DeviceTensors::provide_anew(std::size_t tensor) {
  provided_[tensor] = false;
  provide(tensor);
}

void DeviceTensors::upload(std::size_t tensor) {
  const auto& rows = truth_->encoded(tensor);
  auto& buffer = buffers_[tensor];
  std::size_t done = std::min(rows.size(), buffer.bytes());
  backend_->write(buffer.data(), rows.data(), done);
  // The distinct rows repeat: each copy doubles them on the device.
  while (done < buffer.bytes()) {
    const std::size_t more = std::min(done, buffer.bytes() - done);
    backend_->copy(buffer.data() + done, buffer.data(), more);
    done += more;
  }
}

void DeviceTensors::poison(std::size_t tensor, std::uint8_t byte) {
  provided_[tensor] = false;
  backend_->fill(buffers_[tensor].data(), byte, buffers_[tensor].bytes());
}

void* DeviceTensors::workspace(std::size_t bytes, std::uint8_t garbage) {
  if (bytes != workspace_.bytes()) workspace_.resize(bytes);
  if (bytes > 0) backend_->fill(workspace_.data(), garbage, bytes);
  return workspace_.data();
}

std::string DeviceTensors::damage() const {
  for (std::size_t i = 0; i < buffers_.size(); ++i)
    if (const auto what = buffers_[i].damage(); !what.empty())
      return fmt::format("{}: {}", truth_->tensors()[i].name, what);
  const auto what = workspace_.damage();
  return what.empty() ? "" : fmt::format("workspace: {}", what);
}

std::string DeviceTensors::change(std::size_t tensor) {
  const auto& rows = truth_->encoded(tensor);
  const auto& buffer = buffers_[tensor];
  const bool whole = buffer.bytes() <= windows * window_bytes;
  const std::size_t size = whole ? buffer.bytes() : window_bytes;
  const std::size_t stride = whole ? 0 : buffer.bytes() / windows;
  const std::size_t shift = whole ? 0 : calls_++ * window_bytes % (stride - window_bytes + 1);
  staging_.resize(std::max(staging_.size(), size));
  for (std::size_t window = 0; window < (whole ? 1 : windows); ++window) {
    const std::size_t begin = window * stride + shift;
    backend_->read(staging_.data(), buffer.data() + begin, size);
    // The content repeats with the distinct rows.
    for (std::size_t at = 0; at < size;) {
      const std::size_t place = (begin + at) % rows.size();
      const std::size_t count = std::min(size - at, rows.size() - place);
      const std::size_t same =
          first_difference(staging_.data() + at, rows.data() + place, count, *parallel_);
      if (same < count) {
        const auto& spec = truth_->tensors()[tensor];
        const auto element =
            static_cast<std::int64_t>((begin + at + same) / dtype_bytes(spec.dtype));
        return fmt::format("{}{}: an input was overwritten", spec.name,
                           coordinates(element, truth_->columns(tensor)));
      }
      at += count;
    }
  }
  return "";
}

void DeviceTensors::restore() {
  for (auto& buffer : buffers_) buffer.arm();
  workspace_.arm();
  std::fill(provided_.begin(), provided_.end(), false);
}

}  // namespace fftune
