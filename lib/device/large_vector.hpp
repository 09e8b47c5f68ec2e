// Vectors of hundreds of megabytes: one thread alone would spend longer on their pages than all
// threads spend on what is computed in them.
#pragma once

#include <cstddef>
#include <vector>

#include "device/program.hpp"

namespace fftune {

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
