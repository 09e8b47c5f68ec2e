// Parameters that have been renamed since records were written. A parameter that was added has its
// value for older records where a space declares it (Parameter::when_absent).
#pragma once

#include <string>
#include <string_view>

#include "registry/variant.hpp"

namespace fftune {

/// Whether a family's name, or the part behind the dot in the name of a part's, is of a pattern in
/// which one '*' stands for any text: "*_sm90".
bool fits_family(std::string_view pattern, std::string_view family);

/// The variant with today's names and words: "down_sm90/schedule=1,consumers=2" becomes
/// "down_sm90/schedule=pingpong,mma_warpgroups=2". Parameters and words
/// that are not in the table stay as they are, and so does a number that no word stands for: the
/// family's space then reports the error. A variant of today's names comes back unchanged.
Variant renamed(const Variant& variant);

/// The same for an id, or for the ids of a recipe joined by " + ". A text that is no id comes back
/// unchanged.
std::string renamed_id(const std::string& id);

}  // namespace fftune
