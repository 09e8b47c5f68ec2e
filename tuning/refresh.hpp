// Refreshing a record: only what won or came close is timed again, which takes seconds.
#pragma once

#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "store/record.hpp"

namespace fftune {

/// The changes since the record was made, one line each: the driver, the toolkit, the sources of a
/// family, or that a family no longer exists. Empty: the record stands as it is.
std::vector<std::string> changes_since(const PresetRecord& record, const Catalog& catalog,
                                       const DeviceFacts& facts);

/// The winner's variants, then the ties and the runners-up: for TuneOptions::only.
std::vector<Variant> stored_variants(const PresetRecord& record);

/// The result of a search among stored_variants(), completed from the earlier search: how many
/// variants it had of the same stages, which strategy, and whether it was complete.
PresetRecord refreshed(PresetRecord now, const PresetRecord& before);

}  // namespace fftune
