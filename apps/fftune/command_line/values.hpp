// The words of the command line to values. Every failure is an Error(invalid_input) that starts
// with `where`, such as "--d".
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fftune::tool {

/// A whole decimal number in [least, most].
std::int64_t parse_whole(const std::string& text, const std::string& where, std::int64_t least,
                         std::int64_t most);

/// "1,16,256" as its parts; an empty part is an error.
std::vector<std::string> parse_words(const std::string& text, const std::string& where);
/// Sorted, each once.
std::vector<std::int64_t> parse_whole_list(const std::string& text, const std::string& where,
                                           std::int64_t least, std::int64_t most);

/// Throws if `text` is none of `choices`, naming the nearest and all of them.
void check_choice(const std::string& text, const std::string& where,
                  const std::vector<std::string>& choices);

/// How the text of an option becomes its value, which must live as long as the command line.
struct Reader {
  using Read = std::function<void(const std::string& text, const std::string& where)>;

  Reader(Read by, std::string first = {}) : read(std::move(by)), initial(std::move(first)) {}
  /// Any text.
  Reader(std::string& value);
  /// Texts as they come: words, or an option that may be repeated.
  Reader(std::vector<std::string>& values);

  Read read;
  std::string initial;  // the value without the option, for --help; empty: its help says it
  bool repeats = false;
};

// The value so far is `initial`, unless the option cannot have it: a count or a time of 0.

/// As parse_whole().
template <class Number>
Reader whole(Number& value, std::int64_t least, std::int64_t most) {
  return {[&value, least, most](const std::string& text, const std::string& where) {
            value = static_cast<Number>(parse_whole(text, where, least, most));
          },
          std::cmp_less(value, least) ? "" : fmt::format("{}", value)};
}
Reader whole_list(std::vector<std::int64_t>& values, std::int64_t least, std::int64_t most);
Reader seed(std::uint64_t& value);
/// From "500ms", "60s", "2m", "1h"; more than 0, or with `or_none` "0s" as well.
Reader duration(double& seconds, bool or_none = false);
/// A count such as "2e11" or "200000000000"; more than 0.
Reader amount(double& value);
/// A part of 1 from "1%" or "0.5%"; from 0 to 100.
Reader percent(std::optional<double>& value);
Reader choice(std::string& value, std::vector<std::string> choices);
/// As parse_words(); without `choices` any words.
Reader words(std::vector<std::string>& values, std::vector<std::string> choices = {});

/// " (did you mean X?)", or empty.
std::string near_word(std::string_view word, const std::vector<std::string>& choices);

/// ": did you mean X?", or empty.
std::string suggestion(std::string_view word, const std::vector<std::string>& choices);

}  // namespace fftune::tool
