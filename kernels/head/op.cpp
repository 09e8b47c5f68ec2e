// head: its fields, and what follows from its parts.
#include <fmt/format.h>

#include <deque>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/part_stages.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/head/head.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/norm/norm.hpp"
#include "kernels/sample/sample.hpp"
#include "registry/part_family.hpp"

namespace fftune::head {
namespace {

constexpr const char* usual_eps = "1e-06";

/// Without a norm the product is the first of all kernels.
void launch_behind_norm(const Family&, const Problem& problem, const DeviceFacts& facts,
                        Program& program) {
  if (!problem.has("norm", "none")) launch_programmatically(program, facts);
}

std::vector<OptionField> option_fields() {
  std::vector<OptionField> fields = sample::options();
  fields.front().help += "; none: the logits are the result";
  fields.front().choices.emplace_back("none");
  std::vector<OptionField> own{
      rare_option("norm", "the norm of x: by the root mean square, layer normalisation, or none",
                  {"rms", "layer", "none"}),
      rare_option(
          "logits",
          "element type of the logits, to which they are rounded before ids are chosen: that "
          "of x, or f32",
          {"same", "f32"}),
      rare_option(
          "convention",
          "where norm=rms rounds, and whether its weights are kept as their distance from 1",
          {"llama", "gemma", "t5"}),
      rare_number("eps", "added to the norm's mean square", usual_eps, {0, 1}),
      rare_option("bias", "whether the product has a bias", {"no", "yes"})};
  for (OptionField& field : packed_options()) {
    if (field.name == "weights")
      field.help = "format of the product's weight: that of x, or packed in that format";
    own.push_back(std::move(field));
  }
  fields.insert(fields.end(), std::make_move_iterator(own.begin()),
                std::make_move_iterator(own.end()));
  return fields;
}

OpFacts facts() {
  return {.name = "head",
          .summary = "head of a language model: norm, logits of the vocabulary, and the next ids",
          .passes = {"fwd"},
          .sizes = {token_count("m", "tokens", {1, 16, 64}, {1, 16}),
                    {.name = "d", .help = "features of a token", .max = norm::most_features},
                    {.name = "vocab",
                     .help = "ids to choose from",
                     .max = sample::most_ids,
                     .example = 32000},
                    sample::best_field()},
          .options = option_fields()};
}

class Head final : public DescribedOp {
 public:
  Head() : DescribedOp(facts()) {}

  std::string contradiction(const Problem& problem) const override {
    if (problem.options.contains("norm") && problem.options.contains("convention"))
      return "convention=" + problem.option("convention") + " is of norm=rms";
    if (problem.has("norm", "none") && problem.options.contains("eps"))
      return "eps=" + problem.option("eps") + " is of a norm: give norm=rms or norm=layer";
    if (problem.has("choose", "none") && problem.sizes.contains("best"))
      return fmt::format("best={} is of a choice: give choose=argmax or choose=sample",
                         problem.size("best"));
    if (problem.has("choose", "none"))
      for (const char* name : {"logprobs", "softcap"})
        if (problem.options.contains(name))
          return fmt::format("{}={} is of a choice: give choose=argmax or choose=sample", name,
                             problem.option(name));
    if (auto reason = packed_contradiction(problem, "d", problem.size("d")); !reason.empty())
      return reason;
    return contradiction_of_parts(problem, parts_of);
  }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    std::vector<TensorSpec> inputs, outputs, intermediates;
    for (const OpPart& part : parts_of(problem))
      for (TensorSpec tensor : part.op->tensors(part.problem)) {
        tensor.name = part.tensor(tensor.name);
        if (find_tensor(inputs, tensor.name) || find_tensor(intermediates, tensor.name)) continue;
        const bool is_last = part.op == &sample_op() || problem.has("choose", "none");
        if (tensor.role == Role::output && (!is_last || tensor.name == "normalised"))
          tensor.role = Role::intermediate;
        (tensor.role == Role::input    ? inputs
         : tensor.role == Role::output ? outputs
                                       : intermediates)
            .push_back(std::move(tensor));
      }
    for (auto* more : {&outputs, &intermediates})
      inputs.insert(inputs.end(), std::make_move_iterator(more->begin()),
                    std::make_move_iterator(more->end()));
    return inputs;
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    return stages_of_parts(parts_of(problem));
  }

  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    reference_of_parts(parts_of(problem), stage, tensors, parallel);
  }

  std::vector<OpPart> parts(const Problem& problem) const override { return parts_of(problem); }

  std::vector<const Family*> families() const override {
    static const auto families = [] {
      struct Part {
        const char* name;
        const Op& (*op)();
        const char* stage;
      };
      std::deque<PartFamily> all;
      for (const Part& part :
           {Part{"norm", rmsnorm_op, stage_forward}, Part{"layernorm", layernorm_op, stage_forward},
            Part{"product", linear_op, linear::stage_product},
            Part{"product", linear_op, linear::stage_expand},
            Part{"choose", sample_op, sample::stage}})
        for (const Family* family : part.op().families())
          if (family->stages().back() == part.stage)
            all.emplace_back(head_op, part.name, *family, launch_behind_norm);
      return all;
    }();
    std::vector<const Family*> list{&choose_decode()};
    for (const PartFamily& family : families) list.push_back(&family);
    return list;
  }
};

}  // namespace

std::vector<OpPart> parts_of(const Problem& problem) {
  const std::int64_t m = problem.size("m"), d = problem.size("d"), vocab = problem.size("vocab");
  const bool widens = problem.has("logits", "f32");
  std::vector<OpPart> parts;
  // The kind of device decides about dtypes alone: those that CUDA has not, no op has.
  const auto add = [&](const char* name, const Op& op, std::map<std::string, std::int64_t> sizes,
                       std::map<std::string, std::string> options,
                       std::map<std::string, std::string> names, DType dtype) {
    parts.push_back(
        {name, &op,
         canonical(op, {std::string(op.name()), "fwd", dtype, std::move(sizes), std::move(options)},
                   DeviceKind::cuda),
         std::move(names)});
  };
  const std::string eps = option_or(problem, "eps", usual_eps);
  const bool normalises = !problem.has("norm", "none");
  if (problem.has("norm", "layer"))
    add("layernorm", layernorm_op(), {{"m", m}, {"d", d}}, {{"eps", eps}},
        {{"w", "w_norm"}, {"b", "b_norm"}, {"y", "normalised"}}, problem.dtype);
  else if (normalises)
    add("norm", rmsnorm_op(), {{"m", m}, {"d", d}},
        {{"convention", option_or(problem, "convention", "llama")}, {"eps", eps}},
        {{"w", "w_norm"}, {"y", "normalised"}}, problem.dtype);
  add("product", linear_op(), {{"m", m}, {"k", d}, {"n", vocab}},
      {{"bias", option_or(problem, "bias", "no")}, {"output", widens ? "f32" : "same"}},
      {{"x", normalises ? "normalised" : "x"}, {"y", "logits"}}, problem.dtype);
  // Groups that do not divide d are contradiction()'s to refuse: parts are made for any d.
  for (const char* name : {"weights", "group", "zeros"})
    if (problem.options.contains(name)) parts.back().problem.options[name] = problem.option(name);
  if (problem.has("choose", "none")) return parts;
  std::map<std::string, std::string> options;
  for (const char* name : {"choose", "softcap", "logprobs"})
    if (problem.options.contains(name)) options[name] = problem.option(name);
  std::map<std::string, std::int64_t> sizes{{"m", m}, {"vocab", vocab}};
  if (problem.sizes.contains("best")) sizes["best"] = problem.size("best");
  add("choose", sample_op(), std::move(sizes), std::move(options), {},
      widens ? DType::f32 : problem.dtype);
  return parts;
}

}  // namespace fftune::head

const fftune::Op& fftune::head_op() {
  static const head::Head op;
  return op;
}
