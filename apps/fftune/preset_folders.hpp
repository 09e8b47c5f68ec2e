// --presets: the folders that presets are read from.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "apps/fftune/session.hpp"
#include "store/preset_library.hpp"

namespace CLI {
class App;
}  // namespace CLI

namespace fftune::tool {

void add_presets_option(CLI::App& command, std::string& value);

/// The folder named, which must be there; else ./presets where it is; else the library's folders.
std::vector<std::filesystem::path> preset_folders(const std::string& value,
                                                  const Environment& environment);

/// The library's folders; warns of missing folders in FFTUNE_PRESETS.
std::vector<std::filesystem::path> searched_folders(const Environment& environment);

/// Whether there is a ./presets, which commands read unless --presets names another.
bool presets_are_here();

/// How the library comes to load what was written to `folder`, for people: nothing where it looks
/// there, or where every record of it is installed already.
std::string how_to_install(const std::filesystem::path& folder, const Environment& environment);

/// Loads them, and logs every complaint, and that ./presets is read where the library does not
/// look.
PresetLibrary load_presets(const std::string& value, const Session& session);
PresetLibrary load_presets(const std::vector<std::filesystem::path>& folders);

}  // namespace fftune::tool
