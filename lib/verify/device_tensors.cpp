#include "verify/device_tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "device/parallel.hpp"
#include "verify/comparison.hpp"

namespace fftune {
namespace {

using Guard = std::array<std::uint16_t, GuardedBuffer::guard_bytes / 2>;

/// Every 16-bit word, and every pair of them, is a NaN in each dtype: what a kernel reads out of
/// bounds and uses shows in its output. The words differ, so that copied guards show too.
const Guard& guard_pattern() {
  static const Guard pattern = [] {
    Guard words{};
    for (std::size_t i = 0; i < words.size(); ++i)
      words[i] = static_cast<std::uint16_t>(0xff81u + i % 127u);
    return words;
  }();
  return pattern;
}

}  // namespace

void GuardedBuffer::resize(std::size_t bytes) {
  if (!buffer_ || buffer_->bytes() < bytes + 2 * guard_bytes) {
    buffer_.reset();  // first, so that the old and the new need not fit together
    buffer_ = backend_->allocate(bytes + 2 * guard_bytes);
  }
  bytes_ = bytes;
  arm();
}

void GuardedBuffer::arm() {
  if (!allocated()) return;
  backend_->write(data() - guard_bytes, guard_pattern().data(), guard_bytes);
  backend_->write(data() + bytes_, guard_pattern().data(), guard_bytes);
}

std::string GuardedBuffer::damage() const {
  if (!allocated()) return "";
  Guard found;
  const auto* const expected = reinterpret_cast<const std::byte*>(guard_pattern().data());
  const auto* const bytes = reinterpret_cast<const std::byte*>(found.data());
  for (const bool after : {true, false}) {
    backend_->read(found.data(), after ? data() + bytes_ : data() - guard_bytes, guard_bytes);
    if (found == guard_pattern()) continue;
    std::size_t count = 0;
    std::size_t nearest = guard_bytes;
    for (std::size_t i = 0; i < guard_bytes; ++i) {
      if (bytes[i] == expected[i]) continue;
      ++count;
      nearest = std::min(nearest, after ? i : guard_bytes - 1 - i);
    }
    return fmt::format("{} bytes of the guard {} it were written, the nearest {} bytes away", count,
                       after ? "after" : "before", nearest + 1);
  }
  return "";
}

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
    // Tensors that depend on marks move with every number of tokens, and drawn values, such as
    // lengths, may change.
    if (truth_->sources(i) != nullptr || tensors[i].draw) provided_[i] = false;
    if (void* const memory = truth_->data().in_place(i)) {
      addresses_[i] = memory;
      continue;
    }
    if (tensors[i].role != Role::intermediate) hold(i);
  }
}

void DeviceTensors::hold(std::size_t tensor) {
  const std::size_t bytes = truth_->tensors()[tensor].bytes();
  if (buffers_[tensor].allocated() && buffers_[tensor].bytes() == bytes) return;
  buffers_[tensor].resize(bytes);
  addresses_[tensor] = buffers_[tensor].data();
  provided_[tensor] = false;
}

void DeviceTensors::provide(std::size_t tensor, std::size_t first_stage) {
  if (truth_->data().in_place(tensor)) return;
  hold(tensor);
  if (provided_[tensor]) return;
  upload(tensor, first_stage);
  provided_[tensor] = true;
}

void DeviceTensors::provide_anew(std::size_t tensor, std::size_t first_stage) {
  provided_[tensor] = false;
  provide(tensor, first_stage);
}

void DeviceTensors::gather(std::size_t tensor, const std::vector<std::byte>& rows,
                           std::size_t begin, std::size_t size, std::vector<std::byte>& out) const {
  const std::int64_t* const sources = truth_->sources(tensor);
  const std::size_t row_bytes = static_cast<std::size_t>(truth_->columns(tensor)) *
                                dtype_bytes(truth_->tensors()[tensor].dtype);
  out.resize(size);
  for_each_block(static_cast<std::int64_t>(size), 1, *parallel_, [&](const Block& block) {
    const auto last = static_cast<std::size_t>(block.last_row);
    for (auto at = static_cast<std::size_t>(block.first_row); at < last;) {
      const std::size_t row = (begin + at) / row_bytes, within = (begin + at) % row_bytes;
      const std::size_t count = std::min(last - at, row_bytes - within);
      std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(
                                     static_cast<std::size_t>(sources[row]) * row_bytes + within),
                  count, out.begin() + static_cast<std::ptrdiff_t>(at));
      at += count;
    }
  });
}

void DeviceTensors::upload(std::size_t tensor, std::size_t first_stage) {
  const auto& rows = truth_->encoded(tensor, first_stage);
  auto& buffer = buffers_[tensor];
  if (truth_->sources(tensor) != nullptr) {
    constexpr std::size_t part = std::size_t{64} << 20;
    std::vector<std::byte> bytes;
    for (std::size_t begin = 0; begin < buffer.bytes(); begin += part) {
      gather(tensor, rows, begin, std::min(part, buffer.bytes() - begin), bytes);
      backend_->write(buffer.data() + begin, bytes.data(), bytes.size());
    }
    return;
  }
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
  hold(tensor);
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

std::string DeviceTensors::change(std::size_t tensor, std::size_t first_stage) {
  if (truth_->data().in_place(tensor)) return "";
  const auto& rows = truth_->encoded(tensor, first_stage);
  const auto& buffer = buffers_[tensor];
  const bool whole = buffer.bytes() <= windows * window_bytes;
  const std::size_t size = whole ? buffer.bytes() : window_bytes;
  const std::size_t stride = whole ? 0 : buffer.bytes() / windows;
  const std::size_t shift = whole ? 0 : calls_++ * window_bytes % (stride - window_bytes + 1);
  staging_.resize(std::max(staging_.size(), size));
  for (std::size_t window = 0; window < (whole ? 1 : windows); ++window) {
    const std::size_t begin = window * stride + shift;
    backend_->read(staging_.data(), buffer.data() + begin, size);
    std::vector<std::byte> gathered;
    const bool sorted_out = truth_->sources(tensor) != nullptr;
    if (sorted_out) gather(tensor, rows, begin, size, gathered);
    // Else the content repeats with the distinct rows.
    for (std::size_t at = 0; at < size;) {
      const std::size_t place = sorted_out ? at : (begin + at) % rows.size();
      const std::size_t count = sorted_out ? size : std::min(size - at, rows.size() - place);
      const std::byte* const expected = (sorted_out ? gathered : rows).data() + place;
      const std::size_t same = first_difference(staging_.data() + at, expected, count, *parallel_);
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
