#include "apps/fftune/op_forms.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "core/error.hpp"
#include "tuning/measure/statistics.hpp"

namespace fftune::tool {

namespace {

/// An extent is told by its values for several sizes of no meaning: a formula that holds for all is
/// no accident.
constexpr std::size_t probe_rows = 8;

/// Of the field at a place. Fields must go together: what may be left out and is small (heads of k,
/// features to rotate, a page) is a power of two that divides the heads and their features, which
/// are multiples of 64. Large ones are odd, so that no rounded quotient is an exact one.
std::int64_t probe_size(std::size_t row, std::size_t place, const SizeField& field) {
  std::uint64_t state = 64 * row + place;
  const auto drawn = static_cast<std::int64_t>(next_random(state) >> 1);
  if (field.max > 1024) return 1001 + 2 * (drawn % 15000);
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

/// Whether the op has buffers for it: some options ask for others.
bool stands_alone(const Op& op, const Problem& problem) {
  try {
    op.tensors(problem);
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// The form with the sizes of another row, but for those that decide how many buffers there are.
Problem resized(const Op& op, Problem form, std::size_t row) {
  const auto names = buffer_names(op, form);
  const auto fields = op.sizes();
  for (std::size_t i = 0; i < fields.size(); ++i) {
    Problem next = form;
    const auto size = next.sizes.find(fields[i].name);
    if (size == next.sizes.end()) continue;
    size->second = probe_size(row, i, fields[i]);
    if (stands_alone(op, next) && buffer_names(op, next) == names) form = std::move(next);
  }
  return form;
}

/// What the op has against the form whatever its sizes are: the same for each row of them.
std::string refusal(const Op& op, const Problem& form) {
  const std::string reason = op.contradiction(form);
  for (std::size_t row = 0; row < probe_rows; ++row)
    if (op.contradiction(resized(op, form, row)) != reason) return "";
  return reason;
}

/// The form with a rare size too.
Problem with_rare(const Op& op, Problem form, const std::string& name) {
  form.sizes[name] = 2;
  return stands_alone(op, form) ? resized(op, std::move(form), 0) : form;
}

const TensorSpec& tensor_of(const std::vector<TensorSpec>& tensors, const std::string& name) {
  return tensors.at(tensor_index(tensors, name));
}

/// A formula: its text, and its value for the sizes of a problem.
struct Formula {
  std::string text;
  std::function<std::int64_t(const Problem&)> value;
};

std::vector<Formula> sizes_of(const Problem& form) {
  std::vector<Formula> singles;
  for (const auto& [name, size] : form.sizes)
    singles.push_back({name, [name = name](const Problem& at) { return at.size(name); }});
  return singles;
}

/// Sizes, and products of two and three of them.
std::vector<Formula> products(const Problem& form) {
  const std::vector<Formula> singles = sizes_of(form);
  std::vector<Formula> all = singles;
  std::vector<std::size_t> last;  // the place of the last factor: products have them in order
  for (std::size_t i = 0; i < singles.size(); ++i) last.push_back(i);
  std::size_t begin = 0;
  for (int factors = 2; factors <= 3; ++factors) {
    const std::size_t end = all.size();
    for (std::size_t i = begin; i < end; ++i)
      for (std::size_t next = last[i]; next < singles.size(); ++next) {
        all.push_back({all[i].text + " * " + singles[next].text,
                       [a = all[i].value, b = singles[next].value](const Problem& at) {
                         return a(at) * b(at);
                       }});
        last.push_back(next);
      }
    begin = end;
  }
  return all;
}

std::int64_t quotient(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// The formulas in which extents are told, the simplest first.
std::vector<Formula> formulas(const Problem& form) {
  const std::vector<Formula> base = products(form);
  std::vector<Formula> all = base;
  for (const Formula& one : base)
    for (const std::int64_t factor : {2, 3})
      all.push_back({fmt::format("{} * {}", factor, one.text),
                     [factor, a = one.value](const Problem& at) { return factor * a(at); }});
  for (const Formula& one : base)
    all.push_back({one.text + " + 1", [a = one.value](const Problem& at) { return a(at) + 1; }});
  for (const Formula& one : base)
    for (const std::int64_t part : {2, 4, 8, 16, 32, 64, 128, 256}) {
      all.push_back({fmt::format("ceil({} / {})", one.text, part),
                     [part, a = one.value](const Problem& at) { return quotient(a(at), part); }});
      // Words of 32 bits, in vectors of 4.
      all.push_back(
          {fmt::format("4 * ceil({} / {})", one.text, part),
           [part, a = one.value](const Problem& at) { return 4 * quotient(a(at), part); }});
    }
  // Sums are of an op with two counts of the same kind: routed and shared experts.
  for (const auto& [a, size] : form.sizes)
    for (const auto& [b, other] : form.sizes) {
      if (a == b) continue;
      if (a < b) {
        const auto sum = [a = a, b = b](const Problem& at) { return at.size(a) + at.size(b); };
        all.push_back({fmt::format("{} + {}", a, b), sum});
        for (const auto& [c, third] : form.sizes)
          all.push_back({fmt::format("{} * ({} + {})", c, a, b),
                         [sum, c = c](const Problem& at) { return at.size(c) * sum(at); }});
      }
      const auto parts = [a = a, b = b](const Problem& at) {
        return quotient(at.size(a), at.size(b));
      };
      all.push_back({fmt::format("ceil({} / {})", a, b), parts});
      for (const auto& [c, third] : form.sizes)
        all.push_back({fmt::format("{} * ceil({} / {})", c, a, b),
                       [parts, c = c](const Problem& at) { return at.size(c) * parts(at); }});
    }
  return all;
}

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
    if (stands_alone(op, problem) && refusal(op, problem) == refusal(op, usual))
      add(std::move(text), std::move(problem));
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
  std::vector<Problem> probes;
  std::vector<std::vector<TensorSpec>> tensors;
  for (std::size_t row = 0; row < probe_rows; ++row) {
    probes.push_back(resized(op, form, row));
    tensors.push_back(op.tensors(probes.back()));
  }
  const std::vector<Formula> singles = sizes_of(form);
  std::vector<Formula> all;  // made where no single size will do
  std::map<std::string, std::vector<std::string>> result;
  for (const TensorSpec& tensor : tensors.front()) {
    std::vector<std::vector<std::int64_t>> shapes;
    for (const auto& row : tensors) shapes.push_back(tensor_of(row, tensor.name).shape);
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
      const auto holds = [&](const Formula& formula) {
        for (std::size_t row = 0; row < probes.size(); ++row)
          if (formula.value(probes[row]) != shapes[row].at(i)) return false;
        return true;
      };
      const auto find = [&](const std::vector<Formula>& among) {
        const auto found = std::find_if(among.begin(), among.end(), holds);
        return found == among.end() ? "?" : found->text;
      };
      const std::int64_t extent = tensor.shape[i];
      std::string symbol = fmt::format("{}", extent);
      if (!std::all_of(shapes.begin(), shapes.end(),
                       [&](const auto& shape) { return shape[i] == extent; })) {
        symbol = find(singles);
        if (symbol == "?" && all.empty()) all = formulas(form);
        if (symbol == "?") symbol = find(all);
      }
      result[tensor.name].push_back(std::move(symbol));
    }
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
