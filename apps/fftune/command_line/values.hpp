// The words of the command line to values. Every failure is an Error(invalid_input) that starts
// with `where`, such as "--d".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fftune::tool {

/// A whole decimal number in [least, most].
std::int64_t parse_whole(const std::string& text, const std::string& where, std::int64_t least,
                         std::int64_t most);
std::uint64_t parse_seed(const std::string& text, const std::string& where);

/// "1,16,256" as its parts; an empty part is an error.
std::vector<std::string> parse_words(const std::string& text, const std::string& where);
/// Sorted, each once.
std::vector<std::int64_t> parse_whole_list(const std::string& text, const std::string& where,
                                           std::int64_t least, std::int64_t most);

/// Seconds from "500ms", "60s", "2m", "1h"; more than 0, or with `or_none` "0s" as well.
double parse_duration(const std::string& text, const std::string& where, bool or_none = false);

/// A count such as "2e11" or "200000000000"; more than 0.
double parse_amount(const std::string& text, const std::string& where);

/// A part of 1 from "1%" or "0.5%"; from 0 to 100.
double parse_percent(const std::string& text, const std::string& where);

/// Throws if `text` is none of `choices`, naming the nearest and all of them.
void check_choice(const std::string& text, const std::string& where,
                  const std::vector<std::string>& choices);

/// " (did you mean X?)", or empty.
std::string near_word(std::string_view word, const std::vector<std::string>& choices);

/// ": did you mean X?", or empty.
std::string suggestion(std::string_view word, const std::vector<std::string>& choices);

}  // namespace fftune::tool
