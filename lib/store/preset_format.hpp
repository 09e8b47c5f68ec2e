// The format of a preset file, apart from any file: its version, and text to records.
#pragma once

#include <filesystem>
#include <string>

#include "store/preset_file.hpp"

namespace fftune {

/// Written as "schema"; raised whenever a field is added or changes its meaning. Files of an older
/// version are read: they lack what may be left out, and up to 2 they have old names of parameters
/// (store/renamed_parameters.hpp).
constexpr int preset_schema = 3;

/// Never throws for the contents of the text. `path` is where it comes from, for the complaints.
PresetFile parse_preset_text(const std::string& text, const std::filesystem::path& path);

}  // namespace fftune
