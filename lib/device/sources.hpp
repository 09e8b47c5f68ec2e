// Kernel sources: their code, and those that are embedded or in a folder, with their includes
// followed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace fftune {

// C++ and CUDA sources as the compiler sees them: their tokens, whatever the comments and the
// format.

/// A word (a name or a number), a literal with its quotes, or one other character.
struct Token {
  std::string_view text;
  bool apart = false;        // white space or a comment stands before it
  bool begins_line = false;  // and a line break among that; a source's first token too
};

using Tokens = std::vector<Token>;

/// The tokens of `source`, which they point into: phases 2 and 3 of [lex.phases] in the C++
/// standard, with operators character by character. A word that a continued line divides is two
/// tokens. A literal or comment that is never closed ends with the source.
Tokens tokens_of(std::string_view source);

/// The tokens as text, with a space only where two would be another without it (`int x`, `+ +`).
/// A preprocessor directive keeps its line, and where it has spaces one, as `F (x)` and `F(x)`
/// define different macros. So sources with the same code compile alike.
std::string code_of(const Tokens& tokens);

struct Include {
  std::string name;
  bool quoted = false;  // "name", else <name>
};

/// The include directives, in order.
std::vector<Include> includes_of(const Tokens& tokens);

// The embedded kernel sources: file name -> text, with their includes followed.

class SourceSet {
 public:
  /// Names are relative to the kernels folder: "gemm/groups.cuh".
  explicit SourceSet(std::map<std::string, std::string> files);

  bool has(std::string_view file) const { return files_.contains(std::string(file)); }
  /// All names, sorted.
  std::vector<std::string> names() const;
  /// These sources with the device sources (.cu and .cuh) of `folder`, a kernels folder, in place
  /// of their own. Host sources stay: they are what was compiled into this program. Throws
  /// Error(invalid_input) if the folder has none, or one cannot be read.
  SourceSet with_device_sources_of(const std::filesystem::path& folder) const;
  /// Throws Error(internal) if there is no such file.
  const std::string& text(std::string_view file) const;
  /// `file` and every embedded file it includes with quotes, directly or not, sorted; `file`
  /// first. A host source's includes are not embedded and are left out; a .cuh that is missing is
  /// an Error(internal).
  std::vector<std::string> closure(std::string_view file) const;
  /// One hash over the names and the code (code_of()) of the closures of `files`: sixteen hex
  /// digits. Neither a comment nor the format of a source changes it.
  std::string hash(const std::vector<std::string>& files) const;

 private:
  /// Read when it is first asked for, as most programs ask for few files.
  struct File {
    std::string text;
    mutable std::once_flag read;
    mutable std::uint64_t code_hash = 0;
    mutable std::vector<std::string> includes;  // those with quotes
  };

  const File& file_of(std::string_view name) const;
  const File& read(std::string_view name) const;

  std::map<std::string, File> files_;
};

}  // namespace fftune
