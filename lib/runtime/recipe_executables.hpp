// The work that a plan enqueues: the executables of a recipe's variants, in order.
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

/// The program of a recipe's variant behind the one before it: not launched programmatically where
/// that one writes what its first kernel reads early.
Program program_in(const Recipe& recipe, std::size_t place, const Op& op, const Problem& problem,
                   const DeviceFacts& facts);

/// Makes the program one that a plan can begin with: its first kernel, which may load weights
/// before it waits, would overtake what wrote them.
void launch_normally(Program& program);

/// Makes a variant's program executable, or throws.
using MakeExecutable =
    std::function<std::shared_ptr<const Executable>(const Variant&, const Program&)>;

/// A plan's executables in their order; for a problem that is made of equal ones, once for each.
Executables executables_of(const Op& op, const Problem& problem, const DeviceFacts& facts,
                           const Recipe& recipe, const MakeExecutable& make);

/// The most scratch that any of them needs.
std::size_t scratch_bytes(const Executables& executables);

}  // namespace fftune
