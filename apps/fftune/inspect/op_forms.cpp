#include "apps/fftune/inspect/ops.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
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

/// Nothing if the op has no buffers for it: some options ask for others.
std::optional<std::vector<std::string>> names_if_alone(const Op& op, const Problem& problem) {
  try {
    return buffer_names(op, problem);
  } catch (const Error&) {
    return std::nullopt;
  }
}

bool stands_alone(const Op& op, const Problem& problem) {
  return names_if_alone(op, problem).has_value();
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

/// The op's reason for refusing the form whatever its sizes are: the same for each row of them.
std::string refusal(const Op& op, const Problem& form) {
  const std::string reason = op.contradiction(form);
  if (reason.empty()) return "";
  std::vector<std::string> names;  // found where they are needed: it takes long
  for (std::size_t row = 0; row < probe_rows; ++row) {
    if (op.contradiction(wholly_resized(op, form, row)) == reason) continue;
    if (names.empty()) names = buffer_names(op, form);
    if (op.contradiction(resized(op, form, row, names)) != reason) return "";
  }
  return reason;
}

const TensorSpec& tensor_of(const std::vector<TensorSpec>& tensors, const std::string& name) {
  return tensors.at(tensor_index(tensors, name));
}

/// A size, an extent or a formula, for the sizes of each row.
using Values = std::array<std::int64_t, probe_rows>;

template <class Function>
Values each(const Function& function) {
  Values values;
  for (std::size_t row = 0; row < probe_rows; ++row) values[row] = function(row);
  return values;
}

std::int64_t quotient(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// Tells extents by formulas of a form's sizes.
class Formulas {
 public:
  explicit Formulas(const std::vector<Problem>& rows) {
    for (const auto& [name, size] : rows.front().sizes)
      products_.push_back(
          {name, each([&, name = name](std::size_t row) { return rows[row].size(name); })});
    sizes_ = products_.size();
  }

  /// The first that holds in every row, the simplest first; "?" if none does.
  std::string text_of(const Values& extents) {
    if (const Term* found = product(extents)) return found->text;
    if (std::string text = multiple(extents); !text.empty()) return text;
    if (std::string text = part(extents); !text.empty()) return text;
    if (std::string text = of_two(extents); !text.empty()) return text;
    if (std::string text = blocks(extents); !text.empty()) return text;
    if (std::string text = behind_rows(extents); !text.empty()) return text;
    return "?";
  }

 private:
  struct Term {
    std::string text;
    Values values;
  };

  std::span<const Term> sizes() const { return {products_.data(), sizes_}; }

  const Term* product(const Values& extents) {
    const auto holds = [&](const Term& term) { return term.values == extents; };
    const auto found = std::find_if(products_.begin(), products_.end(), holds);
    if (found != products_.end()) return &*found;
    if (products_.size() > sizes_) return nullptr;
    multiply();
    return product(extents);
  }
  /// Adds products of two and three sizes, which have their factors in order.
  void multiply() {
    std::vector<std::size_t> last;
    for (std::size_t i = 0; i < sizes_; ++i) last.push_back(i);
    std::size_t begin = 0;
    for (int factors = 2; factors <= 3; ++factors) {
      const std::size_t end = products_.size();
      for (std::size_t i = begin; i < end; ++i)
        for (std::size_t next = last[i]; next < sizes_; ++next) {
          const Term &one = products_[i], &other = products_[next];
          products_.push_back({one.text + " * " + other.text, each([&](std::size_t row) {
                                 return one.values[row] * other.values[row];
                               })});
          last.push_back(next);
        }
      begin = end;
    }
  }
  std::string multiple(const Values& extents) const {
    for (const Term& one : products_)
      for (const std::int64_t factor : {2, 3})
        if (extents == each([&](std::size_t row) { return factor * one.values[row]; }))
          return fmt::format("{} * {}", factor, one.text);
    for (const Term& one : products_)
      if (extents == each([&](std::size_t row) { return one.values[row] + 1; }))
        return one.text + " + 1";
    return "";
  }
  /// Words of 32 bits come in vectors of 4, blocks of gate and up in pairs.
  std::string part(const Values& extents) const {
    for (const Term& one : products_)
      for (const std::int64_t of : {2, 4, 8, 16, 32, 64, 128, 256}) {
        const Values parts = each([&](std::size_t row) { return quotient(one.values[row], of); });
        if (extents == parts) return fmt::format("ceil({} / {})", one.text, of);
        for (const std::int64_t factor : {2, 4})
          if (extents == each([&](std::size_t row) { return factor * parts[row]; }))
            return fmt::format("{} * ceil({} / {})", factor, one.text, of);
      }
    return "";
  }
  /// Sums are of an op with two counts of the same kind: routed and shared experts, heads of q and
  /// of k and v.
  std::string of_two(const Values& extents) const {
    for (const Term& a : sizes())
      for (const Term& b : sizes()) {
        if (&a == &b) continue;
        for (const auto& [times, text] : {std::pair{1, ""}, std::pair{2, "2 * "}}) {
          if (times == 1 && &a > &b) continue;
          const Values sum =
              each([&](std::size_t row) { return a.values[row] + times * b.values[row]; });
          if (extents == sum) return fmt::format("{} + {}{}", a.text, text, b.text);
          if (const Term* factor = factor_of(extents, sum))
            return fmt::format("{} * ({} + {}{})", factor->text, a.text, text, b.text);
        }
        const Values parts =
            each([&](std::size_t row) { return quotient(a.values[row], b.values[row]); });
        if (extents == parts) return fmt::format("ceil({} / {})", a.text, b.text);
        if (const Term* factor = factor_of(extents, parts))
          return fmt::format("{} * ceil({} / {})", factor->text, a.text, b.text);
      }
    return "";
  }
  /// Scales of groups in pairs, behind those of rows: nvfp4.
  std::string behind_rows(const Values& extents) const {
    for (const Term& one : products_)
      if (extents == each([&](std::size_t row) { return quotient(one.values[row], 32) + 2; }))
        return fmt::format("ceil({} / 32) + 2", one.text);
    return "";
  }
  /// Tiles of 16 rows of a packed matrix, and the parts of its blocks behind a header: one or two.
  /// Blocks of 128 rows of a matrix with a scale for each.
  std::string blocks(const Values& extents) const {
    for (const Term& rows : rows_of_matrices()) {
      const Values tiles = each([&](std::size_t row) { return quotient(rows.values[row], 16); });
      if (extents == tiles) return fmt::format("ceil({} / 16)", rows.text);
      if (extents == each([&](std::size_t row) { return quotient(rows.values[row], 128); }))
        return fmt::format("ceil({} / 128)", rows.text);
      for (const Term& columns : sizes())
        for (const auto& [parts, text] : {std::pair{1, ""}, std::pair{2, "2 * "}})
          if (extents == each([&, parts = parts](std::size_t row) {
                return parts * tiles[row] * quotient(columns.values[row], 64) + 1;
              }))
            return fmt::format("{}ceil({} / 16) * ceil({} / 64) + 1", text, rows.text,
                               columns.text);
    }
    return "";
  }
  /// Sizes, the features of all heads of q, k and v, and the rows of all experts, shared ones too.
  std::vector<Term> rows_of_matrices() const {
    std::vector<Term> rows(sizes().begin(), sizes().end());
    const auto add = [&](std::string text, const auto& value) {
      rows.push_back({std::move(text), each(value)});
    };
    for (const Term& dim : sizes())
      for (const Term& heads : sizes()) {
        add(fmt::format("3 * {} * {}", dim.text, heads.text),
            [&](std::size_t row) { return 3 * dim.values[row] * heads.values[row]; });
        if (&dim < &heads)
          add(fmt::format("{} * {}", dim.text, heads.text),
              [&](std::size_t row) { return dim.values[row] * heads.values[row]; });
        for (const Term& other : sizes())
          if (&heads < &other)
            add(fmt::format("{} * ({} + {})", dim.text, heads.text, other.text),
                [&](std::size_t row) {
                  return dim.values[row] * (heads.values[row] + other.values[row]);
                });
        for (const Term& kv_heads : sizes())
          add(fmt::format("{} * ({} + 2 * {})", dim.text, heads.text, kv_heads.text),
              [&](std::size_t row) {
                return dim.values[row] * (heads.values[row] + 2 * kv_heads.values[row]);
              });
      }
    return rows;
  }
  /// The size whose products with the values are the extents; null: none.
  const Term* factor_of(const Values& extents, const Values& values) const {
    for (const Term& size : sizes())
      if (extents == each([&](std::size_t row) { return size.values[row] * values[row]; }))
        return &size;
    return nullptr;
  }

  std::vector<Term> products_;  // the sizes first; of more of them where no size will do
  std::size_t sizes_;
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

}  // namespace

Problem usual_form(const Op& op, const std::string& pass) {
  return probe(op, pass, any_dtype(op));
}

bool is_form(const Op& op, const Problem& problem) {
  if (!stands_alone(op, problem)) return false;
  const std::string reason = refusal(op, problem);
  return reason.empty() || reason == refusal(op, usual_form(op, problem.pass));
}

Problem with_rare(const Op& op, Problem form, const std::string& name) {
  form.sizes[name] = 2;
  const auto names = names_if_alone(op, form);
  return names ? resized(op, std::move(form), 0, *names) : form;
}

std::vector<std::string> buffer_names(const Op& op, const Problem& problem) {
  std::vector<std::string> names;
  for (const TensorSpec& tensor : op.tensors(problem))
    if (tensor.role != Role::intermediate) names.push_back(tensor.name);
  return names;
}

std::vector<Form> other_forms(const Op& op, const std::string& pass, Compared compared) {
  const Problem usual = usual_form(op, pass);
  std::vector<Form> forms;
  const auto add = [&](std::string text, Problem problem) {
    if (!stands_alone(op, problem)) return;
    const bool same = compared == Compared::names
                          ? buffer_names(op, problem) == buffer_names(op, usual)
                          : buffers_of(op, problem) == buffers_of(op, usual);
    if (!same) forms.push_back({std::move(text), std::move(problem)});
  };
  // A size may need an option beside it, and its buffers are told all the same.
  const auto add_unless_refused = [&](std::string text, Problem problem) {
    if (is_form(op, problem)) add(std::move(text), std::move(problem));
  };
  for (const DType dtype : op.dtypes_of_pass(DeviceKind::cuda, pass))
    add_unless_refused(fmt::format("dtype={}", dtype_name(dtype)), probe(op, pass, dtype));
  for (const SizeField& field : op.sizes()) {
    Problem problem = usual;
    if (field.rare) problem = with_rare(op, std::move(problem), field.name);
    add(field.name, std::move(problem));
  }
  for (const OptionField& field : options_of(op, pass))
    for (const std::string& choice : field.choices) {
      Problem problem = usual;
      problem.options[field.name] = choice;
      add_unless_refused(fmt::format("{}={}", field.name, choice), std::move(problem));
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
