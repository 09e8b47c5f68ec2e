// References that outlive the process which computed them: float64 tensors in a file without a
// name, which a supervisor hands from one worker to the next.
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

  /// The `count` values kept under the key; none if they are not there whole: a reference can
  /// always be computed again.
  std::vector<double> find(const std::string& key, std::size_t count, Parallel& parallel) const;
  /// Keeps them, unless they are so many that computing them is little beside the memory they take.
  void keep(const std::string& key, const std::vector<double>& values, Parallel& parallel);

 private:
  int descriptor_;
};

}  // namespace fftune
