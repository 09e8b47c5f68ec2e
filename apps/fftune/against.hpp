// `bench --against`: fftune's times beside those of an earlier run.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "apps/fftune/bench_run.hpp"
#include "apps/fftune/comparison.hpp"
#include "apps/fftune/output.hpp"
#include "apps/fftune/text_table.hpp"
#include "core/problem.hpp"
#include "device/facts.hpp"
#include "registry/catalog.hpp"

namespace fftune::tool {

class Against {
 public:
  /// `path` is what `fftune bench --json` printed, or presets: a file or a folder, whose records of
  /// this device are taken, or all where it has none. Empty: there are no earlier times. Throws
  /// Error(invalid_input).
  Against(std::string path, const DeviceFacts& facts, const Catalog& catalog);

  bool knows(const Problem& problem) const { return times_.contains(compared(problem)); }

  /// The part of --json; null where there is no earlier time, or none now.
  nlohmann::ordered_json add(const std::string& token_size, const BenchResult& result);
  /// Prints nothing if nothing was added.
  void print(const Output& output) const;

  bool any_slower() const { return counts_.slower > 0; }

 private:
  Problem compared(const Problem& problem) const;

  const Catalog& catalog_;
  std::string path_;
  std::map<Problem, Measured> times_;  // by compared_part() of the problem
  ComparisonCounts counts_;
  TextTable table_;
};

}  // namespace fftune::tool
