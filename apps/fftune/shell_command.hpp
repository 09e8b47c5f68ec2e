// Commands that are shown for people to paste into a shell.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fftune::tool {

/// The text as one word of a shell's line, whatever it holds: as it is where no shell reads
/// anything into it, else in quotes. Control characters and bytes that are not printable are
/// escaped, so that what is seen is what is run: $'a\nb', which bash, zsh and ksh read.
std::string shell_word(std::string_view text);

/// Words that came from a file may hold anything, so each is quoted.
class ShellCommand {
 public:
  explicit ShellCommand(std::vector<std::string> words) : words_(std::move(words)) {}

  ShellCommand& word(std::string text);
  /// "--name value"; "--name=value" where the value could be taken for an option.
  ShellCommand& option(const std::string& name, const std::string& value);

  std::string text() const;

 private:
  std::vector<std::string> words_;
};

}  // namespace fftune::tool
