#include "apps/fftune/shell_command.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "apps/fftune/terminal.hpp"

namespace fftune::tool {

namespace {

/// ASCII, and at the start no letter that a shell expands.
bool is_plain(std::string_view text) {
  constexpr std::string_view others = "_./:@%+=,-";
  return !text.empty() && text.front() != '=' && std::all_of(text.begin(), text.end(), [&](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           others.find(c) != std::string_view::npos;
  });
}

}  // namespace

std::string shell_word(std::string_view text) {
  if (is_plain(text)) return std::string(text);
  std::string word;
  if (shown(text) == text) {
    for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return "'" + word + "'";
  }
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f)
      word += fmt::format("\\x{:02x}", byte);
    else
      word += c == '\'' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    // The next digit is no part of the escape before it.
    if (byte < 0x20 || byte >= 0x7f) word += "'$'";
  }
  return "$'" + word + "'";
}

ShellCommand& ShellCommand::word(std::string text) {
  words_.push_back(std::move(text));
  return *this;
}

ShellCommand& ShellCommand::option(const std::string& name, const std::string& value) {
  if (value.starts_with('-')) return word("--" + name + "=" + value);
  return word("--" + name).word(value);
}

std::string ShellCommand::text() const {
  std::string text;
  for (const std::string& word : words_) text += (text.empty() ? "" : " ") + shell_word(word);
  return text;
}

}  // namespace fftune::tool
