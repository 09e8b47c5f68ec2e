// Parameters that families have gained since records of them were written.
#pragma once

#include <string_view>

#include "core/problem.hpp"
#include "device/facts.hpp"
#include "registry/op.hpp"
#include "registry/variant.hpp"

namespace fftune {

/// Whether a family's name, or the part behind the dot in the name of a part's, is of a pattern in
/// which one '*' stands for any text: "*_sm90".
bool fits_family(std::string_view pattern, std::string_view family);

/// The variant with the parameters that its family's space has on this problem, that were added
/// after it was recorded, and that it lacks. Each gets the value that stands for what the family
/// did without it. Any other parameter that is missing stays so, and the space says what is wrong.
Variant completed(const Op& op, const Problem& problem, const DeviceFacts& facts, Variant variant);
Recipe completed(const Op& op, const Problem& problem, const DeviceFacts& facts, Recipe recipe);

}  // namespace fftune
