#include "device/sources.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/hash.hpp"

namespace fftune {
namespace {

namespace fs = std::filesystem;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// Whether `c` may stand in a name or a number, as every byte of a letter beyond ASCII may.
bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || is_digit(c) || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}

bool is_quote(char c) {
  return c == '"' || c == '\'';
}

bool is_space(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r' || c == '\v' || c == '\f';
}

/// The end of the comment that begins at `begin`, before the line break that ends it.
std::size_t comment_end(std::string_view source, std::size_t begin) {
  if (source[begin + 1] == '*') {
    const auto close = source.find("*/", begin + 2);
    return close == source.npos ? source.size() : close + 2;
  }
  // A backslash before the line break continues the comment.
  auto end = source.find('\n', begin);
  while (end != source.npos && source[end - 1] == '\\') end = source.find('\n', end + 1);
  return std::min(end, source.size());
}

/// Reads what separates tokens, from `at` on: notes it in `next`, and returns its end.
std::size_t gap_end(std::string_view source, std::size_t at, Token& next) {
  while (at < source.size()) {
    const auto two = source.substr(at, 2);
    if (two == "\\\n") {
      at += 2;
      continue;
    }
    if (two == "//" || two == "/*") {
      at = comment_end(source, at);
    } else if (is_space(source[at])) {
      next.begins_line |= source[at] == '\n';
      ++at;
    } else {
      break;
    }
    next.apart = true;
  }
  return at;
}

std::size_t raw_literal_end(std::string_view source, std::size_t quote) {
  const auto open = source.find('(', quote);
  if (open == source.npos) return source.size();
  const auto close = ")" + std::string(source.substr(quote + 1, open - quote - 1)) + "\"";
  const auto end = source.find(close, open);
  return end == source.npos ? source.size() : end + close.size();
}

std::size_t literal_end(std::string_view source, std::size_t quote) {
  for (std::size_t at = quote + 1; at < source.size(); ++at) {
    if (source[at] == '\\')
      ++at;
    else if (source[at] == source[quote])
      return at + 1;
  }
  return source.size();
}

std::size_t word_end(std::string_view source, std::size_t begin) {
  const bool number = is_digit(source[begin]);
  const auto separates = [&](std::size_t at) {  // as in 1'000
    return source[at] == '\'' && at + 1 < source.size() && is_word(source[at + 1]);
  };
  std::size_t end = begin + 1;
  while (end < source.size() && (is_word(source[end]) || (number && separates(end)))) ++end;
  return end;
}

bool is_raw_prefix(std::string_view word) {
  return word == "R" || word == "u8R" || word == "uR" || word == "UR" || word == "LR";
}

std::size_t token_end(std::string_view source, std::size_t begin) {
  if (is_quote(source[begin])) return literal_end(source, begin);
  if (!is_word(source[begin])) return begin + 1;
  const auto end = word_end(source, begin);
  const bool raw =
      end < source.size() && source[end] == '"' && is_raw_prefix(source.substr(begin, end - begin));
  return raw ? raw_literal_end(source, end) : end;
}

/// Whether tokens that end and begin so are others when nothing stands between them: words, a word
/// and a literal, operators.
bool would_join(char end, char begin) {
  const auto in_name = [](char c) { return is_word(c) || is_quote(c); };
  const auto in_operator = [](char c) {
    return std::string_view("+-*/%^&|=!<>:.#").find(c) != std::string_view::npos;
  };
  return (in_name(end) && in_name(begin)) || (in_operator(end) && in_operator(begin));
}

bool begins_directive(const Token& token) {
  return token.begins_line && token.text == "#";
}

bool is_device_source(const fs::path& file) {
  return file.extension() == ".cu" || file.extension() == ".cuh";
}

std::string text_in(const fs::path& file) {
  try {
    return read_whole_file(file);
  } catch (const Error& error) {
    throw Error(ErrorKind::invalid_input,
                fmt::format("the device source '{}' {}", file.string(), error.what()));
  }
}

}  // namespace

Tokens tokens_of(std::string_view source) {
  Tokens tokens;
  Token token;
  token.begins_line = true;
  for (auto at = gap_end(source, 0, token); at < source.size();) {
    const auto end = std::min(token_end(source, at), source.size());
    token.text = source.substr(at, end - at);
    tokens.push_back(token);
    token = {};
    at = gap_end(source, end, token);
  }
  return tokens;
}

std::string code_of(const Tokens& tokens) {
  std::string code;
  bool in_directive = false;
  for (const auto& token : tokens) {
    const bool begins = begins_directive(token);
    const bool ends = in_directive && token.begins_line;
    in_directive = begins || (in_directive && !ends);
    if ((begins && !code.empty()) || ends)
      code += '\n';
    else if (token.apart && !code.empty() &&
             (in_directive || would_join(code.back(), token.text.front())))
      code += ' ';
    code += token.text;
  }
  return code;
}

std::vector<Include> includes_of(const Tokens& tokens) {
  std::vector<Include> includes;
  for (auto token = tokens.begin(); token != tokens.end(); ++token) {
    if (!begins_directive(*token) || tokens.end() - token < 3 || token[1].text != "include")
      continue;
    auto part = token + 2;
    if (part->text.size() >= 2 && part->text.front() == '"') {
      includes.push_back({std::string(part->text.substr(1, part->text.size() - 2)), true});
    } else if (part->text == "<") {
      Include include;
      while (++part != tokens.end() && !part->begins_line && part->text != ">")
        include.name += part->text;
      includes.push_back(std::move(include));
    }
  }
  return includes;
}

SourceSet::SourceSet(std::map<std::string, std::string> files) {
  for (auto& [name, text] : files) files_[name].text = std::move(text);
}

std::vector<std::string> SourceSet::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : files_) names.push_back(name);
  return names;
}

SourceSet SourceSet::with_device_sources_of(const fs::path& folder) const {
  std::map<std::string, std::string> files;
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error))
    if (is_device_source(entry->path()))
      files[entry->path().lexically_relative(folder).generic_string()] = text_in(entry->path());
  if (error || files.empty())
    throw Error(ErrorKind::invalid_input,
                fmt::format("'{}' has no device sources{}: give the folder 'kernels' of a checkout",
                            folder.string(), error ? " (" + error.message() + ")" : ""));
  for (const auto& [name, file] : files_)
    if (!is_device_source(name)) files[name] = file.text;
  return SourceSet(std::move(files));
}

const SourceSet::File& SourceSet::file_of(std::string_view name) const {
  const auto found = files_.find(std::string(name));
  if (found == files_.end())
    throw Error(ErrorKind::internal, fmt::format("no embedded source '{}'", name));
  return found->second;
}

const SourceSet::File& SourceSet::read(std::string_view name) const {
  const File& file = file_of(name);
  std::call_once(file.read, [&] {
    const auto tokens = tokens_of(file.text);
    file.code_hash = fnv1a(code_of(tokens));
    for (auto& include : includes_of(tokens))
      if (include.quoted) {
        // Host sources name a device source from the root of the tree.
        constexpr std::string_view root = "kernels/";
        if (include.name.starts_with(root)) include.name.erase(0, root.size());
        file.includes.push_back(std::move(include.name));
      }
  });
  return file;
}

const std::string& SourceSet::text(std::string_view file) const {
  return file_of(file).text;
}

std::vector<std::string> SourceSet::closure(std::string_view file) const {
  std::set<std::string> seen;
  std::vector<std::string> open{std::string(file)};
  while (!open.empty()) {
    const std::string name = open.back();
    open.pop_back();
    if (name != file && !seen.insert(name).second) continue;
    for (const auto& include : read(name).includes) {
      const bool follow = include.ends_with(".cuh") || files_.contains(include);
      if (follow && include != file && !seen.contains(include)) open.push_back(include);
    }
  }
  std::vector<std::string> closure{std::string(file)};
  closure.insert(closure.end(), seen.begin(), seen.end());
  return closure;
}

std::string SourceSet::hash(const std::vector<std::string>& files) const {
  std::set<std::string> all;
  for (const auto& name : files)
    all.merge([&] {
      const auto names = closure(name);
      return std::set<std::string>(names.begin(), names.end());
    }());
  std::uint64_t state = fnv1a_offset;
  for (const auto& name : all) {
    state = fnv1a(name, state);
    state = fnv1a(std::string_view("\0", 1), state);
    state = fnv1a(hex(read(name).code_hash), state);
  }
  return hex(state);
}

}  // namespace fftune
