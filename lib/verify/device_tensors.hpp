// The tensors of a verification on the device, each between guards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/backend.hpp"
#include "verify/truth.hpp"

namespace fftune {

// Device memory between two guard regions, whose change betrays a write out of bounds.

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

class DeviceTensors {
 public:
  DeviceTensors(Backend& backend, Truth& truth, Parallel& parallel);

  /// Sizes the tensors for the truth's problem. Intermediates take memory when a run has them: one
  /// that covers their writer and their readers may not.
  void fit();
  /// Makes a tensor hold its input values, or the reference rounded to its dtype, as a run that
  /// begins with `first_stage` finds it.
  void provide(std::size_t tensor, std::size_t first_stage);
  /// The same of a tensor that a run may have updated since.
  void provide_anew(std::size_t tensor, std::size_t first_stage);
  /// Fills a tensor that is about to be written.
  void poison(std::size_t tensor, std::uint8_t byte);
  /// The workspace, filled with garbage.
  void* workspace(std::size_t bytes, std::uint8_t garbage);

  void* const* addresses() const { return addresses_.data(); }
  std::size_t bytes(std::size_t tensor) const { return buffers_[tensor].bytes(); }

  /// "y: wrote 4 bytes past the end", for the first tensor (or workspace) with damaged guards.
  std::string damage() const;
  /// The change that a run made to a tensor that it should only have read. Up to 32 MiB are
  /// compared whole; beyond that, 32 windows of 1 MiB, which move from call to call.
  std::string change(std::size_t tensor, std::size_t first_stage);
  /// After a run that broke something: guards anew, and every tensor to be provided again.
  void restore();

 private:
  void hold(std::size_t tensor);
  void upload(std::size_t tensor, std::size_t first_stage);
  /// Bytes [begin, begin + size) of a tensor whose rows have sources, from its distinct `rows`.
  void gather(std::size_t tensor, const std::vector<std::byte>& rows, std::size_t begin,
              std::size_t size, std::vector<std::byte>& out) const;

  Backend* backend_;
  Truth* truth_;
  Parallel* parallel_;
  std::vector<GuardedBuffer> buffers_;
  GuardedBuffer workspace_;
  std::vector<void*> addresses_;
  std::vector<bool> provided_;
  std::vector<std::byte> staging_;
  std::size_t calls_ = 0;
};

}  // namespace fftune
