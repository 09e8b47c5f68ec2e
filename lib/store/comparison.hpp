// How problems of an op are compared where records are looked up and merged.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "store/record.hpp"

namespace fftune {

class Op;
struct Catalog;

/// Which size counts the tokens, which options are numbers and patterns, and which sizes and
/// options are performance-neutral (OptionField, SizeField). Another option's value is a word,
/// whatever it reads like.
struct Comparison {
  std::string token_size;
  std::set<std::string> numbers{};
  std::set<std::string> patterns{};
  std::set<std::string> neutral{};
};

Comparison comparison_of(const Op& op);
/// Comparison of an op by its name; if the catalog lacks the op, every field counts.
Comparison comparison_of(const Catalog& catalog, std::string_view op);

/// The problem without its performance-neutral fields. Records for which this is the same serve the
/// same problems equally well: a file needs one of them.
Problem compared_part(const Problem& problem, const Comparison& comparison);

/// The records by compared_part() of their problems. If several have the same, the one measured
/// last is kept; if they are equally old, the last in order.
std::map<Problem, PresetRecord> by_compared_part(const std::vector<PresetRecord>& records,
                                                 const Comparison& comparison);

}  // namespace fftune
