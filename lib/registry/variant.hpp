// A variant: a family with every parameter fixed. A recipe: the variants that make up an op.
#pragma once

#include <compare>
#include <string>
#include <string_view>
#include <vector>

#include "core/config.hpp"

namespace fftune {

struct Variant {
  std::string family;
  Config config;

  /// Stable and readable: "gate_up_sm80/bm=128,bn=64,stages=4".
  std::string id() const;
  /// The inverse of id(); throws Error(invalid_input).
  static Variant parse(std::string_view id);

  auto operator<=>(const Variant&) const = default;
};

/// Variants in stage order that together cover every stage of an op once.
using Recipe = std::vector<Variant>;

/// The ids joined with " + ".
std::string recipe_text(const Recipe& recipe);

/// Whether both are the same variants, whatever order their files give the parameters.
bool same_variants(const Recipe& a, const Recipe& b);

}  // namespace fftune
