// Work on large matrices of the host, divided over threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "device/program.hpp"

namespace fftune {

// Splitting the rows of a matrix over threads.

struct Block {
  int index = 0;
  std::int64_t first_row = 0;
  std::int64_t last_row = 0;  // one past the end
};

/// How many rows make a task of about 2^17 elements: some 100 us of work, a few times the time that
/// it costs to start a thread.
inline std::int64_t rows_per_block(std::int64_t columns) {
  return std::max<std::int64_t>(1, (std::int64_t{1} << 17) / std::max<std::int64_t>(1, columns));
}

inline int block_count(std::int64_t rows, std::int64_t columns) {
  const std::int64_t size = rows_per_block(columns);
  return static_cast<int>((rows + size - 1) / size);
}

inline void for_each_block(std::int64_t rows, std::int64_t columns, Parallel& parallel,
                           const std::function<void(const Block&)>& body) {
  const std::int64_t size = rows_per_block(columns);
  parallel.run(block_count(rows, columns), parallel.max_threads(), [&](int index) {
    const std::int64_t first = index * size;
    body({index, first, std::min(rows, first + size)});
  });
}

/// Calls body(row) for every row, in parallel.
template <typename Body>
void for_each_row(std::size_t rows, std::size_t columns, Parallel& parallel, const Body& body) {
  for_each_block(static_cast<std::int64_t>(rows), static_cast<std::int64_t>(columns), parallel,
                 [&](const Block& block) {
                   for (std::int64_t row = block.first_row; row < block.last_row; ++row)
                     body(static_cast<std::size_t>(row));
                 });
}

// Vectors of hundreds of megabytes: one thread alone would spend longer on their pages than all
// threads spend on what is computed in them.

/// Has all threads make the pages of memory that nobody has used yet. The contents of the memory
/// are lost. Does nothing for less than some pages.
void make_pages(void* memory, std::size_t bytes, Parallel& parallel);

/// `count` zeros.
template <typename T>
std::vector<T> large_vector(std::size_t count, Parallel& parallel) {
  std::vector<T> values;
  values.reserve(count);
  make_pages(values.data(), count * sizeof(T), parallel);
  values.resize(count);
  return values;
}

/// A copy of `from`, which all threads make.
std::vector<double> large_copy(const std::vector<double>& from, Parallel& parallel);

}  // namespace fftune
