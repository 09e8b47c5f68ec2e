// The programs that `fftune compile` compiles, and a report of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "apps/fftune/command_line/problem_options.hpp"
#include "apps/fftune/terminal/json.hpp"
#include "apps/fftune/terminal/output.hpp"
#include "device/backend.hpp"
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
/// in its space; 0: all. None once `cancel` is set.
std::vector<CompileUnit> compile_units(const Op& op, const DeviceFacts& facts,
                                       const std::string& family, const ProblemOptions& chosen,
                                       std::size_t sample, const std::atomic<bool>& cancel);

struct UnitResult {
  bool tried = false;
  CompileReport report;
};

class CompileSummary {
 public:
  /// `results` go with `units`.
  void add(const std::string& arch, const std::vector<CompileUnit>& units,
           const std::vector<UnitResult>& results);

  std::size_t programs() const { return programs_.size(); }
  std::size_t failures() const { return failed_.size(); }
  /// The table, then the failures, one line each; or all kernels as JSON.
  void print(const Output& output) const;

 private:
  struct Row {
    std::string arch;
    std::string family;
    std::size_t programs = 0;
    std::size_t kernels = 0;
    std::size_t failed = 0;
    std::size_t spilled = 0;  // programs with a kernel that spills
    std::size_t cached = 0;
    int registers = 0;
    std::size_t shared_bytes = 0;
    double seconds = 0;
  };

  Row& row(const std::string& arch, const std::string& family);

  std::vector<Row> rows_;
  std::vector<std::string> failed_;
  std::vector<std::string> warnings_;  // of the assembler
  Json programs_ = Json::Array();
};

}  // namespace fftune::tool
