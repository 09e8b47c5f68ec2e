#include "api/allocations.hpp"

#include <cstdlib>
#include <new>

namespace {

thread_local std::size_t count = 0;

void* counted(std::size_t bytes, std::size_t alignment) {
  ++count;
  void* const data = alignment > alignof(std::max_align_t)
                         ? std::aligned_alloc(alignment, (bytes + alignment - 1) & ~(alignment - 1))
                         : std::malloc(bytes ? bytes : 1);
  if (!data) throw std::bad_alloc();
  return data;
}

}  // namespace

void* operator new(std::size_t bytes) {
  return counted(bytes, 1);
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* data) noexcept {
  std::free(data);
}
void operator delete(void* data, std::size_t) noexcept {
  std::free(data);
}
void operator delete(void* data, std::align_val_t) noexcept {
  std::free(data);
}
void operator delete(void* data, std::size_t, std::align_val_t) noexcept {
  std::free(data);
}

namespace fftune::test {

std::size_t allocations() {
  return count;
}

}  // namespace fftune::test
