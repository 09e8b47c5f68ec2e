// Reading an object's fields, each wrong one named: "verdict.median_us: expected …, found …".
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "store/json_value.hpp"

namespace fftune {

/// Fit for an op, a family, a parameter, a folder: letters, digits, '_', '-' and '.', the first
/// neither '-' nor '.'. Names become parts of paths, ids and command lines.
bool is_name(std::string_view text);

/// Every call throws Error(invalid_input) with one line that names the field by its path from the
/// record on, what was expected, and what was found. A key that nobody asks for, and one that is
/// there twice, is wrong too: it is more likely a slip than a wish to be ignored.
class FieldReader {
 public:
  /// `where` is the object's own path; empty for the outermost.
  FieldReader(const JsonValue& object, std::string where);

  /// Whether the key is there: for the few that may be left out.
  bool has(std::string_view key) const;
  const JsonValue& at(std::string_view key);
  const std::string& text(std::string_view key);
  const std::string& nonempty_text(std::string_view key);
  /// Text that is_name().
  const std::string& name(std::string_view key);
  /// The value of an option: a number, which parse_number() reads, or text that is_name(), which a
  /// value may follow after a ':', as in a pattern or a routing: anything printable.
  const std::string& choice(std::string_view key);
  bool boolean(std::string_view key);
  /// Finite, and at least 0; `positive`: above 0.
  double number(std::string_view key, bool positive = false);
  std::int64_t integer(std::string_view key, std::int64_t least, std::int64_t most);
  int count(std::string_view key) {
    return static_cast<int>(integer(key, 0, std::numeric_limits<int>::max()));
  }
  std::uint64_t unsigned_integer(std::string_view key);
  const JsonValue::Array& array(std::string_view key);
  /// An array of strings that are not empty and differ.
  std::vector<std::string> names(std::string_view key);

  /// The members not asked for so far.
  JsonValue::Object rest() const;
  /// Throws if there is any.
  void finish() const;

  std::string path(std::string_view key) const;
  [[noreturn]] void expected(std::string_view key, std::string_view what,
                             const JsonValue& found) const;
  /// The key itself is wrong.
  [[noreturn]] void expected_name(std::string_view key) const;

 private:
  const JsonValue::Object* object_;
  std::string where_;
  std::vector<std::string_view> asked_;
};

}  // namespace fftune
