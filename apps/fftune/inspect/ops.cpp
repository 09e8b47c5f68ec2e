// fftune ops: every op with its problem fields and the order of its buffers.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <utility>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/problem_options.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/commands.hpp"
#include "apps/fftune/inspect/ops.hpp"
#include "apps/fftune/terminal/json.hpp"

namespace fftune::tool {

namespace {

std::vector<std::string> dtype_names(const Op& op, DeviceKind kind) {
  std::vector<std::string> names;
  for (const DType dtype : op.dtypes(kind)) names.emplace_back(dtype_name(dtype));
  return names;
}

Json buffers_json(const Op& op, const Problem& problem) {
  Json buffers = Json::Array();
  auto extents = symbols(op, problem);
  for (const TensorSpec& tensor : op.tensors(problem)) {
    if (tensor.role == Role::intermediate) continue;
    buffers.push_back(
        {{"name", tensor.name}, {"role", role_name(tensor.role)}, {"shape", extents[tensor.name]}});
  }
  return buffers;
}

Json option_json(const OptionField& field) {
  Json json = {{"name", field.name}, {"help", field.help}};
  if (field.number) {
    json["default"] = field.choices.at(0);
    json["least"] = field.number->least;
    json["most"] = field.number->most;
  } else {
    json["choices"] = field.choices;
  }
  if (!field.pass.empty()) json["pass"] = field.pass;
  json["performance_neutral"] = field.performance_neutral;
  return json;
}

Json op_json(const Op& op) {
  Json json = {{"op", op.name()}, {"summary", op.summary()}, {"passes", Json::Array()}};
  json["dtypes"] = {{"cuda", dtype_names(op, DeviceKind::cuda)},
                    {"cpu", dtype_names(op, DeviceKind::cpu)}};
  json["token_size"] = op.token_size();
  for (const SizeField& field : op.sizes())
    json["sizes"].push_back({{"name", field.name},
                             {"help", field.help},
                             {"max", field.max},
                             {"rare", field.rare},
                             {"performance_neutral", field.performance_neutral},
                             {"default_on_cuda", field.default_on_cuda},
                             {"default_on_cpu", field.default_on_cpu}});
  for (const OptionField& field : op.options()) json["options"].push_back(option_json(field));
  for (const std::string& pass : op.passes()) {
    Json forms = Json::Object();
    for (const Form& form : other_forms(op, pass, Compared::names))
      forms[form.text] = buffers_json(op, form.problem);
    json["passes"].push_back({{"pass", pass},
                              {"buffers", buffers_json(op, usual_form(op, pass))},
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
    const Problem problem = usual_form(op, pass);
    auto extents = symbols(op, problem);
    output.line("");
    output.line(fmt::format("buffers of pass {}, in order:", pass));
    TextTable buffers({{"buffer"}, {"role"}, {"shape"}});
    for (const TensorSpec& tensor : op.tensors(problem))
      if (tensor.role != Role::intermediate)
        buffers.row({tensor.name, std::string(role_name(tensor.role)),
                     fmt::format("[{}]", fmt::join(extents[tensor.name], ", "))});
    output.table(buffers);
    for (const Form& form : other_forms(op, pass, Compared::names))
      output.line(
          fmt::format("with {}: {}", form.text, fmt::join(buffer_names(op, form.problem), ", ")));
  }
}

int print_ops(const Session& session) {
  Json document = Json::Array();
  for (const Op* op : session.catalog.ops) {
    if (session.output.json()) {
      document.push_back(op_json(*op));
      continue;
    }
    if (op != session.catalog.ops.front()) session.output.line("");
    print_op(*op, session.output);
  }
  session.output.document(document);
  return exit_good;
}

}  // namespace

void add_ops(CommandLine& line) {
  line.add(line.root(), "ops", "every op: its problem's fields, and its buffers in order",
           print_ops);
}

}  // namespace fftune::tool
