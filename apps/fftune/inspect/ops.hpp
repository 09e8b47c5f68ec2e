// The buffers of an op for any sizes, derived from the registry's answers for a few, and what lists
// them: the header fftune/ops.h, and a table for the Python package.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "registry/op.hpp"

namespace fftune::tool {

/// A problem of the pass with every option at its default, rare sizes left out, and sizes of no
/// meaning.
Problem usual_form(const Op& op, const std::string& pass);

/// A problem with other buffers than the usual one: "dtype=fp8", "save=preact", "kv-heads".
struct Form {
  std::string text;
  Problem problem;
};

/// The effect of single dtypes, sizes and options on the names of a pass's buffers, or on their
/// shapes and element types too; only those that change something are listed.
enum class Compared { names, everything };
std::vector<Form> other_forms(const Op& op, const std::string& pass, Compared compared);

/// The op's tensors for the problem; nothing if it has none, or refuses the problem for another
/// reason than the usual form of the pass.
std::optional<std::vector<TensorSpec>> tensors_of_form(const Op& op, const Problem& problem,
                                                       const Problem& usual);

/// A field that may decide about buffers, and its values: choices, dtypes, or whether a rare size
/// is given. The first is the usual one.
struct Axis {
  enum class Kind { dtype, size, option } kind = Kind::option;
  std::string name;
  std::vector<std::string> values;
};
std::vector<Axis> axes_of(const Op& op, const std::string& pass);

/// The place of each axis' value, and the usual form with these values.
using Choice = std::vector<std::uint8_t>;
Problem problem_of(const Op& op, Problem usual, const std::vector<Axis>& axes,
                   const Choice& choice);

std::vector<std::string> buffer_names(const Op& op, const Problem& problem);

/// The extents of each tensor of a form, by its name, in terms of the problem's sizes: "m",
/// "h * experts", "ceil(m / 128)". "?" where none is found.
std::map<std::string, std::vector<std::string>> symbols(const Op& op, const Problem& form);

/// "T" where the element type is the problem's dtype whichever that is, else its name.
std::string dtype_symbol(const Op& op, const Problem& form, const std::string& tensor);

/// The whole header, which is one comment after another.
std::string ops_header(const Catalog& catalog);

/// A JSON document, from which the Python package derives its ops. Each op that is not made of
/// others has its fields, and for each pass every buffer that a problem may have, in the order of
/// the buffers. A buffer is [name, role, dtype, extents, condition]: dtype and extents as in
/// fftune/ops.h, and the condition names the values that options, "dtype" and rare sizes ("given"
/// or "") have where the buffer is. A buffer whose dtype or extents depend on an option is there
/// once for each.
std::string op_table(const Catalog& catalog);

}  // namespace fftune::tool
