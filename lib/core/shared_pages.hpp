// Memory that processes of this host share through a descriptor. It has no name, so nothing of it
// is left when its processes end, however they end; it is sealed, so that none can cut it short
// under another.
#pragma once

#include <cstddef>
#include <utility>

namespace fftune {

class SharedPages {
 public:
  /// Zeros. Throws Error(unavailable).
  static SharedPages make(std::size_t bytes);
  /// Those of another process; takes the descriptor over. Throws Error(io) if it is no such memory
  /// or has fewer bytes.
  static SharedPages open(int descriptor, std::size_t bytes);

  ~SharedPages();
  SharedPages(SharedPages&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(other.bytes_) {}
  SharedPages& operator=(SharedPages&&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  int descriptor() const { return descriptor_; }

 private:
  SharedPages(int descriptor, std::size_t bytes) : descriptor_(descriptor), bytes_(bytes) {}
  void map();

  int descriptor_;
  void* data_ = nullptr;
  std::size_t bytes_;
};

}  // namespace fftune
