#include "tuning/worker/in_flight_record.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.hpp"

namespace fftune {

InFlightRecord::InFlightRecord()
    : descriptor_(::memfd_create("fftune in-flight record", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
  // Sealed, it cannot be cut short under those who have it mapped.
  if (descriptor_ < 0 || ::ftruncate(descriptor_, sizeof(Page)) != 0 ||
      ::fcntl(descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0)
    throw Error(ErrorKind::unavailable,
                fmt::format("no memory can be shared with a worker: {}", std::strerror(errno)));
  map();
}

InFlightRecord::InFlightRecord(int descriptor) : descriptor_(descriptor) {
  struct stat status {};
  const int seals = ::fcntl(descriptor, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(descriptor, &status) != 0 ||
      status.st_size < static_cast<off_t>(sizeof(Page)))
    throw Error(ErrorKind::invalid_input,
                "a worker is started by its supervisor alone: start a search, as in fftune ffn");
  map();
}

InFlightRecord::~InFlightRecord() {
  ::munmap(page_, sizeof(Page));
  ::close(descriptor_);
}

void InFlightRecord::map() {
  void* const memory =
      ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (memory == MAP_FAILED)
    throw Error(ErrorKind::unavailable,
                fmt::format("no memory can be shared with a worker: {}", std::strerror(errno)));
  page_ = static_cast<Page*>(memory);  // zeros: nothing in flight
}

void InFlightRecord::write(bool flying, std::size_t candidate, double expected_seconds) {
  page_->version.fetch_add(1);
  page_->number.fetch_add(flying);
  page_->candidate = candidate;
  page_->expected_seconds = expected_seconds;
  page_->flying = flying;
  page_->version.fetch_add(1);
}

void InFlightRecord::launch(std::size_t candidate, double expected_seconds) {
  write(true, candidate, expected_seconds);
}

void InFlightRecord::land() {
  write(false, 0, 0);
}

std::optional<Launch> InFlightRecord::current() const {
  // A worker that died while it wrote leaves an odd version: what is there is then taken as it is.
  for (int attempt = 0; attempt < 1000; ++attempt) {
    const auto before = page_->version.load();
    const Launch launch{page_->number, page_->candidate, page_->expected_seconds};
    const bool flying = page_->flying;
    if (attempt < 999 && (before % 2 != 0 || page_->version.load() != before)) continue;
    if (!flying) return {};
    return launch;
  }
  return {};
}

}  // namespace fftune
