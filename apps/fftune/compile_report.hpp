// Reports of `compile`, by architecture and family.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/fftune/compile_units.hpp"
#include "apps/fftune/json.hpp"
#include "apps/fftune/output.hpp"
#include "device/backend.hpp"

namespace fftune::tool {

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
  Json programs_ = Json::array();
};

}  // namespace fftune::tool
