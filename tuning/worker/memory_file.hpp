// A file in memory, without a name, that goes with the last process which has it open.
#pragma once

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.hpp"

namespace fftune {

class MemoryFile {
 public:
  /// `name` is for /proc. Throws Error(unavailable).
  explicit MemoryFile(const char* name) : descriptor_(::memfd_create(name, MFD_CLOEXEC)) {
    if (descriptor_ < 0)
      throw Error(ErrorKind::unavailable,
                  fmt::format("no memory can be shared with a worker: {}", std::strerror(errno)));
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

}  // namespace fftune
