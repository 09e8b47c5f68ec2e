// References that outlive the process which computed them: float64 tensors in an unnamed file in
// memory, which a supervisor passes from one worker to the next.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "device/program.hpp"

namespace fftune {

/// Not for several processes at once: a worker has ended before the next one begins.
class ReferenceFile {
 public:
  /// The descriptor, open to read and write, stays the caller's.
  explicit ReferenceFile(int descriptor) : descriptor_(descriptor) {}

  /// The `count` values stored under the key; none if they are missing or damaged, since a
  /// reference can always be computed again.
  std::vector<double> find(const std::string& key, std::size_t count, Parallel& parallel) const;
  /// Stores them, unless they take more memory than recomputing them is worth.
  void keep(const std::string& key, const std::vector<double>& values, Parallel& parallel);

 private:
  int descriptor_;
};

}  // namespace fftune
