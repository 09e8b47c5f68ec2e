// The work of `compile`: the distinct programs of every variant of an op for an architecture.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "apps/fftune/problem_options.hpp"
#include "registry/op.hpp"

namespace fftune::tool {

struct CompileUnit {
  std::string family;   // or the baseline's name
  std::string variant;  // id; of several with the same kernels the first
  std::string problem;
  Program program;
  std::size_t dynamic_shared_bytes = 0;  // the most of any launch
};

/// For the op's example sizes, at every default number of tokens, in every dtype and with every
/// rare option by itself, all variants of every CUDA family that serves, and the baselines; each
/// set of kernels and launch shapes once. A family that serves none of these is compiled for the
/// op's rare sizes, all of them at their examples. `family`: only that one; empty: all. `chosen`:
/// its dtypes and options alone; empty: as above. `sample`: this many of each family, evenly spread
/// in its space; 0: all.
std::vector<CompileUnit> compile_units(const Op& op, const DeviceFacts& facts,
                                       const std::string& family, const ProblemOptions& chosen,
                                       std::size_t sample);

}  // namespace fftune::tool
