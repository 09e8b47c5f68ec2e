// The subcommands of fftune presets, and their common parts.
#pragma once

#include <string>
#include <vector>

#include "apps/fftune/json.hpp"
#include "store/preset_file.hpp"

namespace CLI {
class App;
}  // namespace CLI

namespace fftune::tool {

class CommandLine;

void add_presets_validate(CommandLine& line, CLI::App& group);
void add_presets_show(CommandLine& line, CLI::App& group);
void add_presets_diff(CommandLine& line, CLI::App& group);
void add_presets_merge(CommandLine& line, CLI::App& group);
void add_presets_import(CommandLine& line, CLI::App& group);
void add_presets_install(CommandLine& line, CLI::App& group);

/// The preset files that `paths` name: a file itself, a folder's all. Throws Error(invalid_input)
/// for a path that is not there, and for a folder that has none.
std::vector<PresetFile> preset_files(const std::vector<std::string>& paths);

/// The same where one that is damaged would make the result a wrong one: throws
/// Error(invalid_input) with its first complaint, and that nothing was `done` ("merged").
std::vector<PresetFile> whole_preset_files(const std::vector<std::string>& paths,
                                           const std::string& done);

/// `paths`, or ./presets if there are none.
std::vector<std::string> or_presets_folder(std::vector<std::string> paths);

/// "ffn/fwd bf16 act=silu d=1024 h=2048" without the op: for a table of one file.
std::string problem_without_op(const Problem& problem);

}  // namespace fftune::tool
