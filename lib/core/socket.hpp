// A descriptor of this process alone: a child of fork() closes it.
#pragma once

#include <unistd.h>

#include <utility>

#include "core/fork.hpp"

namespace fftune {

class Socket {
 public:
  explicit Socket(int descriptor = -1) : descriptor_(descriptor) {
    if (descriptor_ >= 0) closes_in_children(descriptor_);
  }
  ~Socket() {
    if (descriptor_ < 0 || forks_ != fork_count()) return;
    closes_in_children(descriptor_, false);
    ::close(descriptor_);
  }
  Socket(Socket&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)), forks_(other.forks_) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    std::swap(forks_, other.forks_);
    return *this;
  }
  int get() const { return descriptor_; }
  /// The caller closes it.
  int release() {
    if (descriptor_ >= 0 && forks_ == fork_count()) closes_in_children(descriptor_, false);
    return std::exchange(descriptor_, -1);
  }
  explicit operator bool() const { return descriptor_ >= 0; }

 private:
  int descriptor_, forks_ = fork_count();
};

}  // namespace fftune
