// Reports of `check`: a table per record, JSON, and JUnit.
#pragma once

#include <string>
#include <vector>

#include "apps/fftune/check_run.hpp"
#include "apps/fftune/json.hpp"
#include "apps/fftune/output.hpp"

namespace fftune::tool {

std::string state_name(CheckState state);
Style state_style(CheckState state);

struct CheckCounts {
  std::size_t passed = 0;
  std::size_t failed = 0;
  std::size_t skipped = 0;
  std::size_t not_run = 0;
};

/// A record fails with any of its problems, and passes if all pass.
CheckCounts print_checks(const std::vector<CheckedRecord>& records, const CheckOutcomes& outcomes,
                         const Catalog& catalog, const Output& output);

Json checks_json(const std::vector<CheckedRecord>& records, const CheckOutcomes& outcomes);

/// As JUnit's XML, one test case for each problem and one for each skipped record.
std::string junit_text(const std::string& device, const std::vector<CheckedRecord>& records,
                       const CheckOutcomes& outcomes);

}  // namespace fftune::tool
