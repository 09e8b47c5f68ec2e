// Times of one record that cannot all be right: the machine was busy during some of them.
#pragma once

#include <string>
#include <vector>

#include "store/record.hpp"
#include "tuning/search/group.hpp"
#include "tuning/search/session.hpp"

namespace fftune {

/// Where a variant that is not among the finalists was timed as clearly faster than all of them,
/// the finals are measured again with it.
void repeat_contradicted_finals(Session& session, std::vector<Searched>& groups);

/// Measures the finals again, in any case.
void repeat_finals(Session& session, std::vector<Searched>& groups);

/// The contradictions in a record, one line each: a stage whose winner took longer than another
/// variant of it, and a whole that took longer than its stages together, or a fraction of that.
std::vector<std::string> contradictions(const PresetRecord& record);

}  // namespace fftune
