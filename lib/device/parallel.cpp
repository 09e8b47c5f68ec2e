#include "device/parallel.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

namespace fftune {
namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t part = std::size_t{4} << 20;  // of a task

}  // namespace

void make_pages(void* memory, std::size_t bytes, Parallel& parallel) {
  // Smaller ones come from the heap, whose pages mostly are there.
  if (bytes < 4 * part) return;
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::size_t before = (page - address % page) % page;
  auto* const begin = static_cast<std::byte*>(memory) + before;
  const std::size_t size = (bytes - before) / page * page;
  const auto tasks = static_cast<int>((size + part - 1) / part);
  parallel.run(tasks, parallel.max_threads(), [&](int task) {
    const std::size_t first = static_cast<std::size_t>(task) * part;
    const std::size_t own = std::min(part, size - first);
    // One call instead of a fault a page. Linux before 5.14 does not know it.
    if (::madvise(begin + first, own, MADV_POPULATE_WRITE) == 0) return;
    for (std::size_t at = first; at < first + own; at += page)
      *static_cast<volatile std::byte*>(begin + at) = std::byte{0};
  });
}

std::vector<double> large_copy(const std::vector<double>& from, Parallel& parallel) {
  auto values = large_vector<double>(from.size(), parallel);
  for_each_block(static_cast<std::int64_t>(from.size()), 1, parallel, [&](const Block& block) {
    std::copy(from.begin() + block.first_row, from.begin() + block.last_row,
              values.begin() + block.first_row);
  });
  return values;
}

}  // namespace fftune
