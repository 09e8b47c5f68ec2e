#include "device/large_vector.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

#include "device/blocks.hpp"

namespace fftune {
namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t large_page = std::size_t{2} << 20;

}  // namespace

void make_pages(void* memory, std::size_t bytes, Parallel& parallel) {
  // Smaller ones come from the heap, whose pages mostly are there.
  if (bytes < 8 * large_page) return;
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::size_t before = (page - address % page) % page;
  auto* const begin = static_cast<std::byte*>(memory) + before;
  const std::size_t size = (bytes - before) / page * page;
  // Where the system has no large pages to give, small ones do.
  static_cast<void>(::madvise(begin, size, MADV_HUGEPAGE));
  const auto tasks = static_cast<int>((size + large_page - 1) / large_page);
  parallel.run(tasks, parallel.max_threads(), [&](int task) {
    const std::size_t first = static_cast<std::size_t>(task) * large_page;
    for (std::size_t at = first; at < std::min(size, first + large_page); at += page)
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
