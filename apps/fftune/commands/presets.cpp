// fftune presets validate|show|diff|merge|install|import-vllm: one file each.
#include "apps/fftune/commands/presets.hpp"
#include <CLI/CLI.hpp>
#include "apps/fftune/command.hpp"
#include "apps/fftune/commands/all.hpp"

namespace fftune::tool {

void add_presets(CommandLine& line) {
  CLI::App& group = line.add_group(line.root(), "presets",
                                   "validate, show, compare, merge and install preset files");
  add_presets_validate(line, group);
  add_presets_show(line, group);
  add_presets_diff(line, group);
  add_presets_merge(line, group);
  add_presets_import(line, group);
  add_presets_install(line, group);
}

}  // namespace fftune::tool
