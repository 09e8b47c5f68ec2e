// Which rank of this host a process is, as the launcher that started it tells by its environment:
// mpirun, torchrun or srun. No library of theirs is needed.
#pragma once

#include <functional>
#include <string>

namespace fftune {

struct LaunchedRank {
  std::string
      job;  // the same in all ranks of the host that were started together, and in no others
  int rank = 0, ranks = 0;  // among those of this host
};

/// `variable`: a variable's value, or null. Throws Error(invalid_input) where no launcher started
/// the process.
LaunchedRank launched_rank(const std::function<const char*(const char*)>& variable);
/// By the environment of this process.
LaunchedRank launched_rank();

}  // namespace fftune
