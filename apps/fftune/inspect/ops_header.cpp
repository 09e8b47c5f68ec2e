#include "apps/fftune/inspect/ops.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "apps/fftune/terminal/text.hpp"

namespace fftune::tool {

namespace {

constexpr std::size_t text_width = 97;  // beside " * "

constexpr const char* preamble =
    R"(fftune's operations: the fields of their problems, and their buffers in the order in which
fftune_plan_run takes them. Generated from the registry by the target ops_header; a test checks
that it is current. It declares nothing: it is here to be read.

Fields. A problem is a JSON object: "op", "pass", "dtype", and the fields below. Sizes are
integers, options are strings; an option that is left out has its first value. A size marked
`rare` may be left out, with the meaning that is given there.

Buffers. Tensors are row-major, and contiguous unless a field of the op is a stride. Shapes are
in elements. T is the problem's dtype; fp8 is e4m3; any other type is as it is named, whichever
the dtype. `?` is an extent that follows from strides: fftune_plan_buffer_bytes gives the bytes.

  input    only read; no run writes to it
  updated  read and written in place: an input and an output in one
  output   written whole, whatever it held before

Inputs come first, with updated tensors among them, then outputs. No output may overlap another
buffer, unless a field says so. A buffer is a device address for a CUDA device and a host address
for the CPU. It is aligned to 16 bytes on CUDA, and to one element on the CPU and where a CUDA
plan runs fallbacks alone. It belongs to the caller, who keeps it until the run has finished.

`kept` marks tensors of the forward pass that a backward pass needs. `sorted` marks rows in the
order of the mask: those that it marks, then the others, each in the order of the tokens. `any
order` marks sums that are accumulated in the order in which blocks finish: two runs may differ
in the last bits.

Options and sizes that change the buffers are listed with the buffers that they add or change,
each by itself. They combine: fftune_plan_describe lists the buffers of one plan, with bytes and
alignment.)";

/// A block comment of lines, each of its own.
std::string comment(const std::string& text) {
  std::string result = "/* ";
  for (const char letter : text) {
    result += letter;
    if (letter == '\n') result += " * ";
  }
  result += " */\n";
  // No line ends in spaces.
  for (auto at = result.find(" \n"); at != std::string::npos; at = result.find(" \n"))
    result.erase(at, 1);
  return result;
}

using Row = std::vector<std::string>;

/// Left-aligned columns; the last is wrapped. Lines start with two spaces.
std::string columns(const std::vector<Row>& rows) {
  std::vector<std::size_t> widths;
  for (const Row& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i + 1 < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line = "  ";
    for (std::size_t i = 0; i + 1 < row.size(); ++i)
      line += fmt::format("{:<{}}  ", row[i], widths[i]);
    text += "\n" + line + wrapped(row.back(), line.size(), text_width);
  }
  return text;
}

std::string dtypes_text(const Op& op, DeviceKind kind, const std::string& pass) {
  std::vector<std::string_view> names;
  for (const DType dtype : op.dtypes_of_pass(kind, pass)) names.push_back(dtype_name(dtype));
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "));
}

Row row_of(const Op& op, const Problem& form, const TensorSpec& tensor,
           const std::vector<std::string>& extents, const std::string& place) {
  std::string marks = fmt::format("[{}]", fmt::join(extents, ", "));
  if (tensor.kept) marks += ", kept";
  if (tensor.any_order) marks += ", any order";
  if (tensor.sorted) marks += ", sorted";
  return {place, tensor.name, std::string(role_name(tensor.role)),
          dtype_symbol(op, form, tensor.name), marks};
}

std::vector<Row> rows_of(const Op& op, const Problem& form) {
  std::vector<Row> rows;
  auto extents = symbols(op, form);
  for (const TensorSpec& tensor : op.tensors(form))
    if (tensor.role != Role::intermediate)
      rows.push_back(
          row_of(op, form, tensor, extents[tensor.name], fmt::format("{}", rows.size())));
  return rows;
}

/// The rows of the form that the usual one does not have, whatever their place.
std::vector<Row> changes(const std::vector<Row>& usual, std::vector<Row> rows) {
  const auto is_usual = [&](const Row& row) {
    return std::any_of(usual.begin(), usual.end(), [&](const Row& other) {
      return std::equal(row.begin() + 1, row.end(), other.begin() + 1, other.end());
    });
  };
  std::erase_if(rows, is_usual);
  return rows;
}

std::string pass_text(const Op& op, const std::string& pass) {
  const Problem usual = usual_form(op, pass);
  const std::vector<Row> rows = rows_of(op, usual);
  std::string text =
      fmt::format("\n\nPass {}: dtype {} on CUDA; {} on the CPU", pass,
                  dtypes_text(op, DeviceKind::cuda, pass), dtypes_text(op, DeviceKind::cpu, pass));
  text += columns(rows);
  for (const Form& form : other_forms(op, pass, Compared::everything)) {
    const std::string start = fmt::format("with {}: ", form.text);
    text +=
        "\n" + wrapped(start + fmt::format("{}", fmt::join(buffer_names(op, form.problem), ", ")),
                       2, text_width);
    const auto changed = changes(rows, rows_of(op, form.problem));
    if (!changed.empty()) text += columns(changed);
  }
  return text;
}

std::string op_text(const Op& op) {
  std::string text = wrapped(fmt::format("{}: {}", op.name(), op.summary()), 2, text_width) + "\n";
  std::vector<Row> fields;
  for (const SizeField& field : op.sizes())
    fields.push_back({field.name, fmt::format("1 to {}{}", field.max, field.rare ? ", rare" : ""),
                      field.name == op.token_size() ? field.help + " (any number)" : field.help});
  for (const OptionField& field : op.options())
    fields.push_back(
        {field.name, choices_text(field),
         field.pass.empty() ? field.help : fmt::format("pass {}: {}", field.pass, field.help)});
  // A list of many choices would leave no room for the meaning.
  constexpr std::size_t widest = 40;
  std::vector<Row> fitting;
  for (const Row& row : fields) {
    if (row[1].size() <= widest) {
      fitting.push_back(row);
      continue;
    }
    fitting.push_back({row[0], "", fmt::format("{}: {}", row[1], row[2])});
  }
  text += columns(fitting);
  for (const std::string& pass : op.passes()) text += pass_text(op, pass);
  return text;
}

}  // namespace

std::string ops_header(const Catalog& catalog) {
  std::string text = comment(preamble);
  text += "#ifndef FFTUNE_OPS_H\n#define FFTUNE_OPS_H\n";
  for (const Op* op : catalog.ops) text += "\n" + comment(op_text(*op));
  return text + "\n#endif\n";
}

}  // namespace fftune::tool
