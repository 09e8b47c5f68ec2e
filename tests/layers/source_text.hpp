// What a source file includes and what words its code has, comments and string contents aside.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fftune::testing {

struct Include {
  std::string name;
  bool quoted = false;  // "name", else <name>
};

/// The include directives outside of comments, in order.
std::vector<Include> includes_of(std::string_view source);

/// The source with each comment replaced by a space; string and character literals keep their
/// quotes, and their contents only if `keep_strings`.
std::string code_of(std::string_view source, bool keep_strings);

/// Whether `code` calls a function of that name: the whole word, then '('.
bool calls(std::string_view code, std::string_view function);

}  // namespace fftune::testing
