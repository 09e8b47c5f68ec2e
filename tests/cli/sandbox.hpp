// The tool in a folder of its own: nothing of the user's is read or written.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "process.hpp"
#include "support/temporary_folder.hpp"

namespace fftune::testing {

class Sandbox {
 public:
  const std::filesystem::path& folder() const { return folder_.path(); }
  /// "ffn --d 32": words between spaces; '' is an empty word. A search has `--wait 0s` unless the
  /// words have a --wait of their own.
  Finished fftune(const std::string& words) const;
  std::unique_ptr<Process> start(const std::string& words) const;
  /// The tool by means of `program`, the words of another one, and with `more` in its environment.
  std::unique_ptr<Process> start_by(std::vector<std::string> program, const std::string& words,
                                    const std::vector<std::string>& more) const;

  /// Opens the folder to all users and copies the tool into it, for another user to run: the
  /// build's may lie below a folder of mode 700. False where others cannot reach this folder
  /// either.
  bool open_to_others();

  /// The tool on a terminal of so many columns; `out` is all that it printed there.
  Finished on_terminal(int columns, const std::string& words) const;

  /// Tunes ffn d=32 h=64 at the given tokens on the CPU and returns the preset file's path.
  std::filesystem::path tuned(const std::string& tokens) const;
  /// The only <device>/ffn.json below `presets`, or an empty path.
  std::filesystem::path preset_file(const std::string& presets = "presets") const;

 private:
  std::vector<std::string> environment() const;

  TemporaryFolder folder_;
  std::filesystem::path tool_ = FFTUNE_TOOL;
};

std::size_t lines_in(const std::string& text);

}  // namespace fftune::testing
