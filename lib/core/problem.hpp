// A problem: an operation with its sizes, types and options.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "core/dtype.hpp"

namespace fftune {

struct Problem {
  std::string op;    // "ffn"
  std::string pass;  // "fwd" or "bwd"
  DType dtype = DType::f32;
  std::map<std::string, std::int64_t> sizes;   // {"d": 1024, "h": 2048, "m": 4096}
  std::map<std::string, std::string> options;  // {"act": "silu"}

  /// Throw Error(invalid_input) if there is no such size, option or number.
  std::int64_t size(std::string_view name) const;
  const std::string& option(std::string_view name) const;
  /// The value of an option that is a number.
  double number(std::string_view name) const;
  /// Whether the option is there and has this value.
  bool has(std::string_view option, std::string_view value) const;

  /// A copy with one size changed: the same layer at another number of tokens.
  Problem with_size(std::string_view name, std::int64_t value) const;

  /// Canonical, readable, and unique: "ffn/fwd bf16 act=silu d=1024 h=2048 m=4096".
  std::string text() const;

  auto operator<=>(const Problem&) const = default;
};

/// The finite decimal number that all of `text` is, or nothing.
std::optional<double> parse_number(std::string_view text);

}  // namespace fftune
