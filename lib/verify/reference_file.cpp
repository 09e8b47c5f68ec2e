#include "verify/references.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>

#include "core/hash.hpp"
#include "device/parallel.hpp"
#include "verify/comparison.hpp"

namespace fftune {
namespace {

/// Limits for one tensor, and for all of them: the file is in memory.
constexpr std::size_t most_bytes_of_one = std::size_t{256} << 20;
constexpr std::size_t most_bytes = std::size_t{1} << 30;

/// Ahead of each tensor's values, end to end.
struct Header {
  std::uint64_t key = 0;
  std::uint64_t bytes = 0;
  std::uint64_t hash = 0;
};

std::size_t file_bytes(int descriptor) {
  struct stat status {};
  return ::fstat(descriptor, &status) == 0 ? static_cast<std::size_t>(status.st_size) : 0;
}

bool read_at(int descriptor, void* to, std::size_t bytes, std::size_t offset) {
  auto* place = static_cast<char*>(to);
  while (bytes > 0) {
    const auto got = ::pread(descriptor, place, bytes, static_cast<off_t>(offset));
    if (got <= 0) return false;
    place += got;
    offset += static_cast<std::size_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

bool write_at(int descriptor, const void* from, std::size_t bytes, std::size_t offset) {
  const auto* place = static_cast<const char*>(from);
  while (bytes > 0) {
    const auto put = ::pwrite(descriptor, place, bytes, static_cast<off_t>(offset));
    if (put <= 0) return false;
    place += put;
    offset += static_cast<std::size_t>(put);
    bytes -= static_cast<std::size_t>(put);
  }
  return true;
}

std::uint64_t hash_of(const std::vector<double>& values, Parallel& parallel) {
  return hash_of_bits(reinterpret_cast<const std::byte*>(values.data()),
                      values.size() * sizeof values[0], parallel);
}

}  // namespace

std::vector<double> ReferenceFile::find(const std::string& key, std::size_t count,
                                        Parallel& parallel) const {
  const std::size_t size = file_bytes(descriptor_);
  const std::uint64_t wanted = fnv1a(key);
  Header header;
  for (std::size_t at = 0; at + sizeof header <= size; at += sizeof header + header.bytes) {
    if (!read_at(descriptor_, &header, sizeof header, at)) break;
    // A record that a dying worker left incomplete: nothing valid follows it.
    if (header.bytes > size - at - sizeof header) break;
    if (header.key != wanted || header.bytes != count * sizeof(double)) continue;
    auto values = large_vector<double>(count, parallel);
    if (!read_at(descriptor_, values.data(), header.bytes, at + sizeof header)) break;
    if (hash_of(values, parallel) == header.hash) return values;
  }
  return {};
}

void ReferenceFile::keep(const std::string& key, const std::vector<double>& values,
                         Parallel& parallel) {
  const Header header{fnv1a(key), values.size() * sizeof values[0], hash_of(values, parallel)};
  if (header.bytes > most_bytes_of_one) return;
  std::size_t end = file_bytes(descriptor_);
  if (end + header.bytes > most_bytes) {
    if (::ftruncate(descriptor_, 0) != 0) return;
    end = 0;
  }
  const bool written = write_at(descriptor_, &header, sizeof header, end) &&
                       write_at(descriptor_, values.data(), header.bytes, end + sizeof header);
  // Out of memory: a partial record would hide those that follow it.
  if (!written && ::ftruncate(descriptor_, static_cast<off_t>(end)) != 0) return;
}

}  // namespace fftune
