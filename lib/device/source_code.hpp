// C++ and CUDA sources as the compiler sees them: their tokens, whatever the comments and the
// format.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fftune {

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

}  // namespace fftune
