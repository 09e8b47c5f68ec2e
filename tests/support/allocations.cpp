// Every form of operator new and delete is replaced, since AddressSanitizer brings every form.
#include "support/allocations.hpp"

#include <cstdlib>
#include <new>

namespace {

thread_local std::size_t count = 0;

void* counted(std::size_t bytes, std::size_t alignment) noexcept {
  ++count;
  if (alignment <= alignof(std::max_align_t)) return std::malloc(bytes ? bytes : 1);
  return std::aligned_alloc(alignment, (bytes + alignment - 1) & ~(alignment - 1));
}

void* checked(void* data) {
  if (!data) throw std::bad_alloc();
  return data;
}

using Size = std::size_t;
using Align = std::align_val_t;
using Quiet = const std::nothrow_t&;

}  // namespace

void* operator new(Size bytes) {
  return checked(counted(bytes, 1));
}
void* operator new[](Size bytes) {
  return checked(counted(bytes, 1));
}
void* operator new(Size bytes, Quiet) noexcept {
  return counted(bytes, 1);
}
void* operator new[](Size bytes, Quiet) noexcept {
  return counted(bytes, 1);
}
void* operator new(Size bytes, Align align) {
  return checked(counted(bytes, Size(align)));
}
void* operator new[](Size bytes, Align align) {
  return checked(counted(bytes, Size(align)));
}
void* operator new(Size bytes, Align align, Quiet) noexcept {
  return counted(bytes, Size(align));
}
void* operator new[](Size bytes, Align align, Quiet) noexcept {
  return counted(bytes, Size(align));
}

void operator delete(void* data) noexcept {
  std::free(data);
}
void operator delete[](void* data) noexcept {
  std::free(data);
}
void operator delete(void* data, Size) noexcept {
  std::free(data);
}
void operator delete[](void* data, Size) noexcept {
  std::free(data);
}
void operator delete(void* data, Quiet) noexcept {
  std::free(data);
}
void operator delete[](void* data, Quiet) noexcept {
  std::free(data);
}
void operator delete(void* data, Align) noexcept {
  std::free(data);
}
void operator delete[](void* data, Align) noexcept {
  std::free(data);
}
void operator delete(void* data, Size, Align) noexcept {
  std::free(data);
}
void operator delete[](void* data, Size, Align) noexcept {
  std::free(data);
}
void operator delete(void* data, Align, Quiet) noexcept {
  std::free(data);
}
void operator delete[](void* data, Align, Quiet) noexcept {
  std::free(data);
}

namespace fftune::test {

std::size_t allocations() {
  return count;
}

}  // namespace fftune::test
