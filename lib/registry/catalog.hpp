// The catalog: the ops that exist, and the device sources they are made of.
#pragma once

#include <string_view>
#include <vector>

#include "device/sources.hpp"
#include "registry/op.hpp"
#include "registry/variant.hpp"

namespace fftune {

struct Catalog {
  std::vector<const Op*> ops;
  const SourceSet* sources = nullptr;

  /// Throws Error(invalid_input) that lists the ops there are.
  const Op& op(std::string_view name) const;
};

/// The ops that fftune ships; defined in kernels/catalog.cpp.
const Catalog& builtin_catalog();

/// The op's family of that name; null if it has none.
const Family* family_if_any(const Op& op, std::string_view name);
/// The same; throws Error(invalid_input) that lists the op's families.
const Family& family_of(const Op& op, std::string_view name);

/// Why the variant cannot serve the problem on the device, one line; empty if it can.
std::string illegality(const Op& op, const Problem& problem, const DeviceFacts& facts,
                       const Variant& variant);

/// A variant on record with the parameters that its family gained later, at the values that its
/// space declares for them (Parameter::when_absent).
Variant completed(const Op& op, const Problem& problem, const DeviceFacts& facts, Variant variant);
Recipe completed(const Op& op, const Problem& problem, const DeviceFacts& facts, Recipe recipe);

/// The recipe to use untuned: for each stage in order the first family (in the op's order, so
/// the fastest expected) that does not refuse, with its default configuration.
Recipe default_recipe(const Op& op, const Problem& problem, const DeviceFacts& facts);
/// The same without one family; empty where the others do not cover all stages.
Recipe default_recipe_without(const Op& op, const Problem& problem, const DeviceFacts& facts,
                              std::string_view family);
/// The recipe of fallback families alone.
Recipe fallback_recipe(const Op& op, const Problem& problem, const DeviceFacts& facts);

}  // namespace fftune
