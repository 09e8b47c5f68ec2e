#include "layers/source_text.hpp"

#include <cctype>
#include <sstream>

namespace fftune::testing {
namespace {

bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
}

/// The end of the literal that starts with the quote at `begin`, past its closing quote.
std::size_t literal_end(std::string_view source, std::size_t begin) {
  if (begin > 0 && source[begin - 1] == 'R' && source[begin] == '"') {
    const auto paren = source.find('(', begin);
    if (paren == source.npos) return source.size();
    const auto close = ")" + std::string(source.substr(begin + 1, paren - begin - 1)) + "\"";
    const auto end = source.find(close, paren);
    return end == source.npos ? source.size() : end + close.size();
  }
  for (std::size_t at = begin + 1; at < source.size(); ++at) {
    if (source[at] == '\\')
      ++at;
    else if (source[at] == source[begin])
      return at + 1;
  }
  return source.size();
}

}  // namespace

std::string code_of(std::string_view source, bool keep_strings) {
  std::string code;
  for (std::size_t at = 0; at < source.size();) {
    const auto two = source.substr(at, 2);
    if (two == "//" || two == "/*") {
      const auto end = source.find(two == "//" ? "\n" : "*/", at + 2);
      at = end == source.npos ? source.size() : end + (two == "//" ? 0 : 2);
      code += ' ';
    } else if (source[at] == '"' || (source[at] == '\'' && (at == 0 || !is_word(source[at - 1])))) {
      // A quote after a digit, as in 1'000, separates digits and starts nothing.
      const auto end = literal_end(source, at);
      const auto literal = source.substr(at, end - at);
      code += keep_strings ? std::string(literal) : std::string(2, source[at]);
      at = end;
    } else {
      code += source[at++];
    }
  }
  return code;
}

std::vector<Include> includes_of(std::string_view source) {
  std::vector<Include> includes;
  std::istringstream lines(code_of(source, true));
  for (std::string line; std::getline(lines, line);) {
    const auto hash = line.find_first_not_of(" \t");
    if (hash == line.npos || line[hash] != '#') continue;
    const auto word = line.find_first_not_of(" \t", hash + 1);
    if (word == line.npos || line.compare(word, 7, "include") != 0) continue;
    const auto begin = line.find_first_of("\"<", word);
    if (begin == line.npos) continue;
    const auto end = line.find(line[begin] == '"' ? '"' : '>', begin + 1);
    if (end == line.npos) continue;
    includes.push_back({line.substr(begin + 1, end - begin - 1), line[begin] == '"'});
  }
  return includes;
}

bool calls(std::string_view code, std::string_view function) {
  for (auto at = code.find(function); at != code.npos; at = code.find(function, at + 1)) {
    if (at > 0 && is_word(code[at - 1])) continue;
    const auto next = code.find_first_not_of(" \t\n", at + function.size());
    if (next != code.npos && code[next] == '(') return true;
  }
  return false;
}

}  // namespace fftune::testing
