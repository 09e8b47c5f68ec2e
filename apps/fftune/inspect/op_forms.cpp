#include "apps/fftune/inspect/ops.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "measure/statistics.hpp"

namespace fftune::tool {

namespace {

/// An extent is told by its values for several sizes of no meaning: a formula that holds for all is
/// no accident.
constexpr std::size_t probe_rows = 8;

/// A size to probe for the field at a place. Fields must go together: small optional sizes (heads
/// of k, features to rotate, a page) are powers of two that divide the heads and their features,
/// which are multiples of 64. Large ones are odd, so that no rounded quotient is an exact one.
std::int64_t probe_size(std::size_t row, std::size_t place, const SizeField& field) {
  std::uint64_t state = 64 * row + place;
  const auto drawn = static_cast<std::int64_t>(next_random(state) >> 1);
  if (field.max > 1024) return 1001 + 2 * (drawn % 1500);
  if (field.max < 128) return 6 + 2 * (drawn % (field.max / 4));
  if (field.rare) return std::int64_t{8} << drawn % 4;
  return 64 * (1 + drawn % (field.max / 128));
}

DType any_dtype(const Op& op) {
  const auto on_cuda = op.dtypes(DeviceKind::cuda);
  return on_cuda.empty() ? op.dtypes(DeviceKind::cpu).at(0) : on_cuda.front();
}

Problem probe(const Op& op, const std::string& pass, DType dtype) {
  Problem problem{std::string(op.name()), pass, dtype, {}, {}};
  const auto fields = op.sizes();
  for (std::size_t i = 0; i < fields.size(); ++i)
    if (!fields[i].rare) problem.sizes[fields[i].name] = probe_size(0, i, fields[i]);
  for (const OptionField& field : options_of(op, pass))
    problem.options[field.name] = field.choices.at(0);
  return problem;
}

using Tensors = std::vector<TensorSpec>;

/// Nothing if the op has no tensors for it: some options ask for others.
std::optional<Tensors> tensors_if_alone(const Op& op, const Problem& problem) {
  try {
    return op.tensors(problem);
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::vector<std::string> names_of(const Tensors& tensors) {
  std::vector<std::string> names;
  for (const TensorSpec& tensor : tensors)
    if (tensor.role != Role::intermediate) names.push_back(tensor.name);
  return names;
}

std::optional<std::vector<std::string>> names_if_alone(const Op& op, const Problem& problem) {
  const auto tensors = tensors_if_alone(op, problem);
  return tensors ? std::optional(names_of(*tensors)) : std::nullopt;
}

/// The form with the sizes of another row.
Problem wholly_resized(const Op& op, Problem form, std::size_t row) {
  const auto fields = op.sizes();
  for (std::size_t i = 0; i < fields.size(); ++i)
    if (const auto size = form.sizes.find(fields[i].name); size != form.sizes.end())
      size->second = probe_size(row, i, fields[i]);
  return form;
}

/// The same but for those sizes that decide how many buffers there are. `names`: those of its
/// buffers.
Problem resized(const Op& op, Problem form, std::size_t row,
                const std::vector<std::string>& names) {
  const auto fields = op.sizes();
  const Problem all = wholly_resized(op, form, row);
  if (all == form || names_if_alone(op, all) == names) return all;
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const auto size = form.sizes.find(fields[i].name);
    if (size == form.sizes.end()) continue;
    const std::int64_t before = std::exchange(size->second, probe_size(row, i, fields[i]));
    if (size->second != before && names_if_alone(op, form) != names) size->second = before;
  }
  return form;
}

/// The op's reason for refusing the form whatever its sizes are: the same for rows of them.
std::string refusal(const Op& op, const Problem& form) {
  const std::string reason = op.contradiction(form);
  if (reason.empty()) return "";
  std::optional<std::vector<std::string>> names;  // found where they are needed: it takes long
  constexpr std::size_t rows = 3;  // enough: most reasons that hang on a size name it
  for (std::size_t row = 0; row < rows; ++row) {
    if (op.contradiction(wholly_resized(op, form, row)) == reason) continue;
    if (!names) names = names_if_alone(op, form);
    if (!names) return reason;
    if (op.contradiction(resized(op, form, row, *names)) != reason) return "";
  }
  return reason;
}

const TensorSpec& tensor_of(const std::vector<TensorSpec>& tensors, const std::string& name) {
  return tensors.at(tensor_index(tensors, name));
}

/// An extent for the sizes of each row.
using Values = std::array<std::int64_t, probe_rows>;

template <class Function>
Values each(const Function& function) {
  Values values;
  for (std::size_t row = 0; row < probe_rows; ++row) values[row] = function(row);
  return values;
}

/// A formula of sizes, and what it is in each row.
struct Term {
  std::string text;
  Values values;
  bool is_sum = false;

  Term(std::string formula, const Values& of_rows) : text(std::move(formula)), values(of_rows) {}
  Term(std::int64_t number)
      : text(fmt::format("{}", number)), values(each([=](std::size_t) { return number; })) {}

  std::string factor() const { return is_sum ? "(" + text + ")" : text; }

  friend Term operator*(const Term& a, const Term& b) {
    return {a.factor() + " * " + b.factor(),
            each([&](std::size_t row) { return a.values[row] * b.values[row]; })};
  }
  friend Term operator+(const Term& a, const Term& b) {
    Term sum(a.text + " + " + b.text,
             each([&](std::size_t row) { return a.values[row] + b.values[row]; }));
    sum.is_sum = true;
    return sum;
  }
  friend Term ceil_div(const Term& a, const Term& b) {
    return {fmt::format("ceil({} / {})", a.text, b.text), each([&](std::size_t row) {
              return (a.values[row] + b.values[row] - 1) / b.values[row];
            })};
  }
};

/// Tells extents by formulas of a form's sizes. There are more formulas where the simpler ones do
/// not tell an extent.
class Formulas {
 public:
  explicit Formulas(const std::vector<Problem>& rows) {
    for (const auto& [name, size] : rows.front().sizes)
      add(sizes_.emplace_back(
          name, each([&, name = name](std::size_t row) { return rows[row].size(name); })));
  }

  /// The first that holds in every row; "?" if none does.
  std::string text_of(const Values& extents) {
    constexpr void (Formulas::*more[])() = {&Formulas::add_products, &Formulas::add_multiples,
                                            &Formulas::add_parts,    &Formulas::add_pairs,
                                            &Formulas::add_matrices, &Formulas::add_header_rows};
    while (true) {
      if (const auto found = texts_.find(extents); found != texts_.end()) return found->second;
      if (added_ == std::size(more)) return "?";
      (this->*more[added_++])();
    }
  }

 private:
  void add(const Term& term) { texts_.try_emplace(term.values, term.text); }

  /// Products of two and three sizes, which have their factors in order.
  void add_products() {
    products_ = sizes_;
    for (std::size_t i = 0; i < sizes_.size(); ++i)
      for (std::size_t j = i; j < sizes_.size(); ++j) products_.push_back(sizes_[i] * sizes_[j]);
    for (std::size_t i = 0; i < sizes_.size(); ++i)
      for (std::size_t j = i; j < sizes_.size(); ++j)
        for (std::size_t k = j; k < sizes_.size(); ++k)
          products_.push_back(sizes_[i] * sizes_[j] * sizes_[k]);
    for (const Term& product : products_) add(product);
  }
  void add_multiples() {
    for (const Term& product : products_)
      for (const std::int64_t factor : {2, 3}) add(factor * product);
    for (const Term& product : products_) add(product + 1);
  }
  /// Words of 32 bits come in vectors of 4, blocks of gate and up in pairs.
  void add_parts() {
    for (const Term& product : products_)
      for (const std::int64_t of : {2, 4, 8, 16, 32, 64, 128, 256}) {
        const Term part = ceil_div(product, of);
        for (const Term& parts : {part, 2 * part, 4 * part}) add(parts);
      }
  }
  /// Sums are of an op with two counts of the same kind: routed and shared experts, heads of q and
  /// of k and v.
  void add_pairs() {
    for (const Term& a : sizes_)
      for (const Term& b : sizes_) {
        if (&a == &b) continue;
        std::vector<Term> pairs{a + 2 * b, ceil_div(a, b)};
        if (&a < &b) pairs.insert(pairs.begin(), a + b);
        for (const Term& pair : pairs) {
          add(pair);
          for (const Term& size : sizes_) add(size * pair);
        }
      }
  }
  /// Tiles of 16 rows of a packed matrix, and the parts of its blocks behind a header: one or two.
  /// Blocks of 128 rows of a matrix with a scale for each.
  void add_matrices() {
    for (const Term& rows : rows_of_matrices()) {
      const Term tiles = ceil_div(rows, 16);
      add(tiles);
      add(ceil_div(rows, 128));
      for (const Term& columns : sizes_) {
        add(tiles * ceil_div(columns, 64) + 1);
        add(2 * tiles * ceil_div(columns, 64) + 1);
      }
    }
  }
  /// Sizes, the features of all heads of q, k and v, and the rows of all experts, shared ones too.
  std::vector<Term> rows_of_matrices() const {
    std::vector<Term> rows = sizes_;
    for (const Term& dim : sizes_)
      for (const Term& heads : sizes_) {
        rows.push_back(3 * dim * heads);
        if (&dim < &heads) rows.push_back(dim * heads);
        for (const Term& other : sizes_)
          if (&heads < &other) rows.push_back(dim * (heads + other));
        for (const Term& kv_heads : sizes_) rows.push_back(dim * (heads + 2 * kv_heads));
      }
    return rows;
  }
  /// Scales of groups in pairs, behind those of rows: nvfp4.
  void add_header_rows() {
    for (const Term& product : products_) add(ceil_div(product, 32) + 2);
  }

  std::vector<Term> sizes_, products_;
  std::map<Values, std::string> texts_;
  std::size_t added_ = 0;  // kinds of formulas
};

struct BufferForm {
  std::string name;
  Role role = Role::input;
  std::vector<std::int64_t> shape;
  DType dtype = DType::f32;

  bool operator==(const BufferForm&) const = default;
};

std::vector<BufferForm> buffers_of(const Op& op, const Problem& problem) {
  std::vector<BufferForm> buffers;
  for (const TensorSpec& tensor : op.tensors(problem))
    if (tensor.role != Role::intermediate)
      buffers.push_back({.name = tensor.name,
                         .role = tensor.role,
                         .shape = tensor.shape,
                         .dtype = tensor.dtype == problem.dtype ? DType::f32 : tensor.dtype});
  return buffers;
}

/// The form with rare sizes too.
Problem with_rare(const Op& op, Problem form, const std::vector<std::string>& rare) {
  for (const std::string& name : rare) form.sizes[name] = 2;
  const auto names = names_if_alone(op, form);
  return names ? resized(op, std::move(form), 0, *names) : form;
}

/// The form without the sizes that are not rare, but that its options do without.
Problem without_unneeded(const Op& op, Problem form) {
  for (const SizeField& field : op.sizes())
    if (!field.rare && !needs_size(field, form)) form.sizes.erase(field.name);
  return form;
}

}  // namespace

Problem usual_form(const Op& op, const std::string& pass) {
  return probe(op, pass, any_dtype(op));
}

std::optional<Tensors> tensors_of_form(const Op& op, const Problem& problem, const Problem& usual) {
  const std::string reason = refusal(op, problem);
  if (!reason.empty() && reason != refusal(op, usual)) return std::nullopt;
  return tensors_if_alone(op, problem);
}

std::vector<Axis> axes_of(const Op& op, const std::string& pass) {
  std::vector<Axis> axes;
  Axis dtypes{Axis::Kind::dtype, "dtype", {"T"}};
  for (const DType dtype : op.dtypes_of_pass(DeviceKind::cuda, pass))
    if (dtype == DType::fp8) dtypes.values.emplace_back(dtype_name(dtype));
  if (dtypes.values.size() > 1) axes.push_back(std::move(dtypes));
  // Strides, the sizes that may exceed 32 bits, make views, whose shapes tell nothing.
  for (const SizeField& field : op.sizes())
    if (field.rare && field.max <= std::numeric_limits<std::int32_t>::max())
      axes.push_back({Axis::Kind::size, field.name, {"", "given"}});
  for (const OptionField& field : options_of(op, pass))
    if (field.has_choices()) axes.push_back({Axis::Kind::option, field.name, field.choices});
  return axes;
}

Problem problem_of(const Op& op, Problem usual, const std::vector<Axis>& axes,
                   const Choice& choice) {
  std::vector<std::string> rare;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    if (choice[i] == 0) continue;
    const Axis& axis = axes[i];
    if (axis.kind == Axis::Kind::option) usual.options[axis.name] = axis.values[choice[i]];
    if (axis.kind == Axis::Kind::dtype) usual.dtype = DType::fp8;
    if (axis.kind == Axis::Kind::size) rare.push_back(axis.name);
  }
  if (!rare.empty()) usual = with_rare(op, std::move(usual), rare);
  return without_unneeded(op, std::move(usual));
}

std::vector<std::string> buffer_names(const Op& op, const Problem& problem) {
  return names_of(op.tensors(problem));
}

std::vector<Form> other_forms(const Op& op, const std::string& pass, Compared compared) {
  const Problem usual = usual_form(op, pass);
  std::vector<Form> forms;
  const auto add = [&](std::string text, Problem problem) {
    if (!tensors_if_alone(op, problem)) return;
    const bool same = compared == Compared::names
                          ? buffer_names(op, problem) == buffer_names(op, usual)
                          : buffers_of(op, problem) == buffers_of(op, usual);
    if (!same) forms.push_back({std::move(text), std::move(problem)});
  };
  // A size may need an option beside it, and its buffers are told all the same.
  const auto add_unless_refused = [&](std::string text, Problem problem) {
    if (tensors_of_form(op, problem, usual)) add(std::move(text), std::move(problem));
  };
  for (const DType dtype : op.dtypes_of_pass(DeviceKind::cuda, pass))
    add_unless_refused(fmt::format("dtype={}", dtype_name(dtype)), probe(op, pass, dtype));
  for (const SizeField& field : op.sizes()) {
    Problem problem = usual;
    if (field.rare) problem = with_rare(op, std::move(problem), {field.name});
    add(field.name, std::move(problem));
  }
  for (const OptionField& field : options_of(op, pass))
    for (const std::string& choice : field.choices) {
      Problem problem = usual;
      problem.options[field.name] = choice;
      add_unless_refused(fmt::format("{}={}", field.name, choice),
                         without_unneeded(op, std::move(problem)));
    }
  return forms;
}

std::map<std::string, std::vector<std::string>> symbols(const Op& op, const Problem& form) {
  const auto names = buffer_names(op, form);
  std::vector<Problem> probes;
  std::vector<std::vector<TensorSpec>> tensors;
  for (std::size_t row = 0; row < probe_rows; ++row) {
    probes.push_back(resized(op, form, row, names));
    tensors.push_back(op.tensors(probes.back()));
  }
  Formulas formulas(probes);
  std::map<std::string, std::vector<std::string>> result;
  for (const TensorSpec& tensor : tensors.front())
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
      const Values extents =
          each([&](std::size_t row) { return tensor_of(tensors[row], tensor.name).shape.at(i); });
      const std::int64_t extent = extents.front();
      const bool is_fixed = std::all_of(extents.begin(), extents.end(),
                                        [&](std::int64_t other) { return other == extent; });
      result[tensor.name].push_back(is_fixed ? fmt::format("{}", extent)
                                             : formulas.text_of(extents));
    }
  return result;
}

std::string dtype_symbol(const Op& op, const Problem& form, const std::string& tensor) {
  const DType here = tensor_of(op.tensors(form), tensor).dtype;
  if (here != form.dtype) return std::string(dtype_name(here));
  for (const DType dtype : op.dtypes_of_pass(DeviceKind::cuda, form.pass)) {
    Problem other = form;
    other.dtype = dtype;
    // Another type may bring other buffers, as fp8 does: a form of its own.
    if (buffer_names(op, other) != buffer_names(op, form)) continue;
    if (tensor_of(op.tensors(other), tensor).dtype != dtype) return std::string(dtype_name(here));
  }
  return "T";
}

}  // namespace fftune::tool
