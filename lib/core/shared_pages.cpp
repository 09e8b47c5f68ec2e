#include "core/shared_pages.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "core/error.hpp"

namespace fftune {
namespace {

constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::string reason() {
  return std::generic_category().message(errno);
}

}  // namespace

SharedPages SharedPages::make(std::size_t bytes) {
  SharedPages pages(::memfd_create("fftune shared pages", MFD_CLOEXEC | MFD_ALLOW_SEALING), bytes);
  // Allocated here, because a page that cannot be had later is a SIGBUS.
  if (pages.descriptor_ < 0 || ::ftruncate(pages.descriptor_, static_cast<off_t>(bytes)) != 0 ||
      ::posix_fallocate(pages.descriptor_, 0, static_cast<off_t>(bytes)) != 0 ||
      ::fcntl(pages.descriptor_, F_ADD_SEALS, seals) != 0)
    throw Error(ErrorKind::unavailable, fmt::format("{} bytes of shared memory cannot be had: {}: "
                                                    "free memory, or ask for less",
                                                    bytes, reason()));
  pages.map();
  return pages;
}

SharedPages SharedPages::open(int descriptor, std::size_t bytes) {
  SharedPages pages(descriptor, bytes);
  struct stat facts = {};
  if (::fstat(descriptor, &facts) != 0 || static_cast<std::size_t>(facts.st_size) < bytes ||
      (::fcntl(descriptor, F_GET_SEALS) & F_SEAL_SHRINK) == 0)
    throw Error(ErrorKind::io,
                fmt::format("what a peer shares is not {} bytes of sealed memory", bytes));
  pages.map();
  return pages;
}

void SharedPages::map() {
  void* const data = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (data == MAP_FAILED)
    throw Error(ErrorKind::unavailable,
                fmt::format("{} bytes of shared memory cannot be mapped: {}", bytes_, reason()));
  data_ = data;
}

SharedPages::~SharedPages() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

}  // namespace fftune
