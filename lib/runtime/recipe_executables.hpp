// What a plan enqueues: the executables of a recipe's variants, in order.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "device/backend.hpp"
#include "registry/op.hpp"
#include "registry/variant.hpp"
#include "runtime/tensor_layout.hpp"

namespace fftune {

/// Throws Error(invalid_input) unless variants that are legal here cover every stage once, in
/// order.
void check_recipe(const Op& op, const Problem& problem, const DeviceFacts& facts,
                  const Recipe& recipe);

/// Makes a variant's program executable, or throws.
using MakeExecutable =
    std::function<std::shared_ptr<const Executable>(const Variant&, const Program&)>;

/// A plan's executables in their order; of a problem that is made of equal ones, once for each.
Executables executables_of(const Op& op, const Problem& problem, const DeviceFacts& facts,
                           const Recipe& recipe, const MakeExecutable& make);

/// The most scratch that any of them needs.
std::size_t scratch_bytes(const Executables& executables);

}  // namespace fftune
