// A report's content as one JSON document, which the page draws.
#pragma once

#include <string>

#include "apps/fftune/json.hpp"
#include "apps/fftune/report/report_input.hpp"

namespace fftune::tool {

/// `date`: when the report is made, UTC.
///   records      of every preset file, with the command that repeats each search
///   searches     of every journal
///   benches      of every bench document: the contenders
///   comparisons  of records of one problem that come from different devices or paths: the first is
///                the one before, each other one after
/// A bench document that cannot be drawn is named in `input.left_out`.
Json report_data(ReportInput& input, const Catalog& catalog, const std::string& date);

/// "fftune ffn --d 1024 --h 2048 --m 64 --dtype bf16": the command that searches this problem
/// again.
std::string search_command(const Problem& problem, const Verdict& verdict,
                           const Provenance& provenance, const Catalog& catalog);

}  // namespace fftune::tool
