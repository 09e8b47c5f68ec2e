// fftune ops: every op with its problem fields and the order of its buffers.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <string>
#include <utility>
#include <vector>

#include "apps/fftune/command.hpp"
#include "apps/fftune/commands/all.hpp"
#include "apps/fftune/exit_code.hpp"
#include "apps/fftune/json.hpp"
#include "apps/fftune/problem_options.hpp"
#include "core/error.hpp"

namespace fftune::tool {

namespace {

// Sizes that no two fields share and that are no product of others, so that a dimension of a
// tensor tells which field it is.
constexpr std::int64_t probe_sizes[] = {1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049};
// Of heads' features, which are few, and multiples of 8.
constexpr std::int64_t small_probe_sizes[] = {136, 152, 184, 232, 248};

Problem probe(const Op& op, const std::string& pass, DType dtype) {
  Problem problem{std::string(op.name()), pass, dtype, {}, {}};
  std::size_t next = 0, next_small = 0;
  for (const SizeField& field : op.sizes()) {
    if (field.rare) continue;
    const std::int64_t size = probe_sizes[next++ % std::size(probe_sizes)];
    const bool is_small = field.max >= 248 && field.max < size;
    problem.sizes[field.name] =
        is_small ? small_probe_sizes[next_small++ % std::size(small_probe_sizes)] : size;
  }
  for (const OptionField& field : options_of(op, pass))
    problem.options[field.name] = field.choices.at(0);
  return problem;
}

std::vector<std::string> symbols(const Problem& problem, const TensorSpec& tensor) {
  std::vector<std::string> dimensions;
  for (const std::int64_t extent : tensor.shape) {
    std::string symbol = fmt::format("{}", extent);
    for (const auto& [name, size] : problem.sizes)
      if (size == extent) symbol = name;
    dimensions.push_back(symbol);
  }
  return dimensions;
}

std::vector<std::string> dtype_names(const Op& op, DeviceKind kind) {
  std::vector<std::string> names;
  for (const DType dtype : op.dtypes(kind)) names.emplace_back(dtype_name(dtype));
  return names;
}

DType any_dtype(const Op& op) {
  const auto on_cuda = op.dtypes(DeviceKind::cuda);
  return on_cuda.empty() ? op.dtypes(DeviceKind::cpu).at(0) : on_cuda.front();
}

/// A problem with other buffers than the usual one: "dtype=fp8", "save=preact", "kv-heads".
struct Form {
  std::string text;
  Problem problem;
};

std::vector<std::string> buffer_names(const Op& op, const Problem& problem) {
  std::vector<std::string> names;
  for (const TensorSpec& tensor : op.tensors(problem))
    if (tensor.role != Role::intermediate) names.push_back(tensor.name);
  return names;
}

/// What single dtypes, sizes and options do to the buffers of a pass, those that change them.
std::vector<Form> other_forms(const Op& op, const std::string& pass) {
  const Problem usual = probe(op, pass, any_dtype(op));
  std::vector<Form> forms;
  const auto add = [&](std::string text, Problem problem) {
    try {
      if (buffer_names(op, problem) != buffer_names(op, usual))
        forms.push_back({std::move(text), std::move(problem)});
    } catch (const Error&) {
      // Alone, beside these sizes, it makes no problem: kv-heads that do not divide the heads, say.
    }
  };
  for (const DType dtype : op.dtypes_of_pass(DeviceKind::cuda, pass))
    add(fmt::format("dtype={}", dtype_name(dtype)), probe(op, pass, dtype));
  for (const SizeField& field : op.sizes()) {
    Problem problem = usual;
    if (field.rare) problem.sizes[field.name] = field.example;
    add(field.name, std::move(problem));
  }
  for (const OptionField& field : options_of(op, pass))
    for (const std::string& choice : field.choices) {
      Problem problem = usual;
      problem.options[field.name] = choice;
      add(fmt::format("{}={}", field.name, choice), std::move(problem));
    }
  return forms;
}

Json buffers_json(const Op& op, const Problem& problem) {
  Json buffers = Json::array();
  for (const TensorSpec& tensor : op.tensors(problem)) {
    if (tensor.role == Role::intermediate) continue;
    Json json = to_json(tensor);
    json.erase("dtype");
    json["shape"] = symbols(problem, tensor);
    buffers.push_back(json);
  }
  return buffers;
}

Json option_json(const OptionField& field) {
  Json json = {{"name", field.name}, {"help", field.help}};
  if (field.number)
    json.update({{"default", field.choices.at(0)},
                 {"least", field.number->least},
                 {"most", field.number->most}});
  else
    json["choices"] = field.choices;
  if (!field.pass.empty()) json["pass"] = field.pass;
  return json;
}

Json op_json(const Op& op) {
  Json json = {{"op", op.name()}, {"summary", op.summary()}, {"passes", Json::array()}};
  json["dtypes"] = {{"cuda", dtype_names(op, DeviceKind::cuda)},
                    {"cpu", dtype_names(op, DeviceKind::cpu)}};
  json["token_size"] = op.token_size();
  for (const SizeField& field : op.sizes())
    json["sizes"].push_back({{"name", field.name},
                             {"help", field.help},
                             {"max", field.max},
                             {"rare", field.rare},
                             {"default_on_cuda", field.default_on_cuda},
                             {"default_on_cpu", field.default_on_cpu}});
  for (const OptionField& field : op.options()) json["options"].push_back(option_json(field));
  for (const std::string& pass : op.passes()) {
    Json forms = Json::object();
    for (const Form& form : other_forms(op, pass))
      forms[form.text] = buffers_json(op, form.problem);
    json["passes"].push_back({{"pass", pass},
                              {"buffers", buffers_json(op, probe(op, pass, any_dtype(op)))},
                              {"buffers_with", forms}});
  }
  for (const Family* family : op.families()) json["families"].push_back(family->name());
  return json;
}

void print_op(const Op& op, const Output& output) {
  output.heading(fmt::format("{}: {}", op.name(), op.summary()));
  TextTable fields({{"field"}, {"values"}, {"meaning"}});
  for (const SizeField& field : op.sizes())
    fields.row({field.name, fmt::format("1 to {}{}", field.max, field.rare ? ", or left out" : ""),
                field.help});
  for (const OptionField& field : op.options())
    fields.row(
        {field.name, choices_text(field),
         field.pass.empty() ? field.help : fmt::format("pass {}: {}", field.pass, field.help)});
  fields.row({"dtype", fmt::format("{}", fmt::join(dtype_names(op, DeviceKind::cuda), ", ")),
              "element type on a GPU"});
  fields.row({"dtype", fmt::format("{}", fmt::join(dtype_names(op, DeviceKind::cpu), ", ")),
              "element type on the CPU"});
  output.table(fields);
  for (const std::string& pass : op.passes()) {
    const Problem problem = probe(op, pass, any_dtype(op));
    output.line("");
    output.line(fmt::format("buffers of pass {}, in order:", pass));
    TextTable buffers({{"buffer"}, {"role"}, {"shape"}});
    for (const TensorSpec& tensor : op.tensors(problem))
      if (tensor.role != Role::intermediate)
        buffers.row({tensor.name, std::string(role_name(tensor.role)),
                     fmt::format("[{}]", fmt::join(symbols(problem, tensor), ", "))});
    output.table(buffers);
    for (const Form& form : other_forms(op, pass))
      output.line(
          fmt::format("with {}: {}", form.text, fmt::join(buffer_names(op, form.problem), ", ")));
  }
}

int run(const Session& session) {
  Json document = Json::array();
  for (const Op* op : session.catalog.ops) {
    if (!document.empty()) session.output.line("");
    document.push_back(op_json(*op));
    print_op(*op, session.output);
  }
  session.output.document(document);
  return exit_good;
}

}  // namespace

void add_ops(CommandLine& line) {
  line.add(line.root(), "ops", "every op: its problem's fields, and its buffers in order", run);
}

}  // namespace fftune::tool
