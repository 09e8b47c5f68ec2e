// fftune presets, and the preset files and folders that commands read.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/terminal/json.hpp"
#include "runtime/devices.hpp"
#include "store/preset_file.hpp"
#include "store/preset_library.hpp"

namespace fftune::tool {

class CommandLine;
struct Command;

void add_presets_validate(CommandLine& line, Command& group);
void add_presets_show(CommandLine& line, Command& group);
void add_presets_diff(CommandLine& line, Command& group);
void add_presets_merge(CommandLine& line, Command& group);
void add_presets_import(CommandLine& line, Command& group);
void add_presets_restamp(CommandLine& line, Command& group);
void add_presets_install(CommandLine& line, Command& group);

/// The preset files that `paths` name: a file itself, a folder's all. Throws Error(invalid_input)
/// for a path that is not there, and for a folder that has none.
std::vector<PresetFile> preset_files(const std::vector<std::string>& paths);

/// Throws Error(invalid_input) with the first complaint if none of the files can be read: nothing
/// is there for this `purpose` ("show").
void expect_readable(const std::vector<PresetFile>& files, std::string_view purpose);

/// As preset_files(), where one that is damaged would make the result a wrong one: throws
/// Error(invalid_input) with its first complaint, and that nothing was `done` ("merged").
std::vector<PresetFile> whole_preset_files(const std::vector<std::string>& paths,
                                           const std::string& done);

/// `paths`, or ./presets if there are none.
std::vector<std::string> or_presets_folder(std::vector<std::string> paths);

/// A GPU of the file's architecture, with its name and number of SMs; nothing for an architecture
/// that fftune does not know, and for a CPU.
std::optional<DeviceFacts> facts_of_preset(const PresetDevice& device);

/// The device that a file is for: itself where it is here, else a typical one of its architecture;
/// none if fftune knows neither.
std::optional<DeviceFacts> facts_for(const PresetDevice& device, const Devices& here);

/// Why the library would skip a record on the device; empty if it would not.
std::string fault_of(const PresetRecord& record, const DeviceFacts& facts, const Catalog& catalog);

/// Warns in one line of records whose problems this version does not know, by an option of a newer
/// one for example.
void warn_of_unknown(const std::vector<PresetFile>& files, const Catalog& catalog);

/// "ffn/fwd bf16 act=silu d=1024 h=2048" without the op: for a table of one file.
std::string problem_without_op(const Problem& problem);

void add_presets_option(Command& command, std::string& value);

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

/// Loads them, and logs every complaint. The first also warns of unknown records, and says that
/// ./presets is read where the library does not look.
PresetLibrary load_presets(const std::string& value, const Session& session);
PresetLibrary load_presets(const std::vector<std::filesystem::path>& folders);

}  // namespace fftune::tool
