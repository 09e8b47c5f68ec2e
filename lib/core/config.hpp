// A configuration: named integer parameters in a fixed order, as in "bm=128,bn=64,stages=4".
#pragma once

#include <compare>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fftune {

class Config {
 public:
  using Entry = std::pair<std::string, std::int64_t>;

  Config() = default;
  Config(std::initializer_list<Entry> entries) : entries_(entries) {}

  /// Parses text(); throws Error(invalid_input) naming the part that is not `name=integer`.
  static Config parse(std::string_view text);

  /// The value of a parameter; throws Error(internal) if there is none of that name.
  std::int64_t at(std::string_view name) const;
  /// The same as an int, for the many parameters that are small.
  int get(std::string_view name) const { return static_cast<int>(at(name)); }
  bool contains(std::string_view name) const;
  /// Changes the parameter, or appends it.
  void set(std::string_view name, std::int64_t value);

  const std::vector<Entry>& entries() const { return entries_; }
  std::string text() const;

  auto operator<=>(const Config&) const = default;

 private:
  std::vector<Entry> entries_;
};

}  // namespace fftune
