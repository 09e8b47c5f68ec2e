// Parameters that have been renamed or added since records were written.
#pragma once

#include <string>

#include "registry/variant.hpp"

namespace fftune {

/// The newest preset schema whose records may have old names.
constexpr int last_schema_of_old_names = 2;

/// The variant with today's names and words: "down_sm90/schedule=1,consumers=2" becomes
/// "down_sm90/schedule=pingpong,mma_warpgroups=2". A parameter that a family has gained since is
/// added with the value that stands for what it did before. A name that is not in the table stays
/// as it is, and so does a number that no word stands for: the family's space then reports the
/// error. A variant of today's names comes back unchanged.
Variant renamed(const Variant& variant);

/// The same for an id, or for the ids of a recipe joined by " + ". A text that is no id comes back
/// unchanged.
std::string renamed_id(const std::string& id);

}  // namespace fftune
