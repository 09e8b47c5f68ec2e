// Device memory between two guard regions, whose change betrays a write out of bounds.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "device/backend.hpp"

namespace fftune {

class GuardedBuffer {
 public:
  /// Bytes of each guard. A multiple of 256, so that the tensor keeps the alignment of a buffer;
  /// the guard after the tensor begins at its very last byte plus one.
  static constexpr std::size_t guard_bytes = 16384;

  explicit GuardedBuffer(Backend& backend) : backend_(&backend) {}

  /// Makes room for `bytes` and writes the guards around them. The memory only grows; its content
  /// is kept if it did not have to. Throws Error(unavailable) if the device is too small.
  void resize(std::size_t bytes);
  /// Writes the guards anew.
  void arm();
  /// Damage to the guards, for people; empty if they are intact.
  std::string damage() const;

  std::byte* data() const { return static_cast<std::byte*>(buffer_->data()) + guard_bytes; }
  std::size_t bytes() const { return bytes_; }
  bool allocated() const { return buffer_ != nullptr; }

 private:
  Backend* backend_;
  std::unique_ptr<Buffer> buffer_;
  std::size_t bytes_ = 0;
};

}  // namespace fftune
