#include "kernels/common/op_parts.hpp"

#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "core/error.hpp"

namespace fftune {

std::vector<DType> float_dtypes(DeviceKind kind) {
  if (kind == DeviceKind::cpu) return {DType::f32, DType::bf16};
  return {DType::bf16, DType::fp16, DType::f32};
}

std::vector<const Family*> DescribedOp::families() const {
  std::vector<const Family*> all;
  for (const auto list : facts_.families)
    for (const Family* family : list()) all.push_back(family);
  return all;
}

std::vector<StageSpec> DescribedOp::stages(const Problem& problem) const {
  StageSpec stage = whole_stage(stage_of_pass(problem.pass), tensors(problem));
  facts_.stage.complete(problem, stage);
  return {stage};
}

WhenAbsent same_as(std::string size) {
  return [size = std::move(size)](const Problem& problem) -> std::optional<std::int64_t> {
    const auto entry = problem.sizes.find(size);
    return entry == problem.sizes.end() ? std::nullopt : std::optional(entry->second);
  };
}

WhenAbsent usually(std::int64_t value) {
  return [value](const Problem&) { return value; };
}

SizeField token_count(std::string name, std::string help, std::vector<std::int64_t> on_cuda,
                      std::vector<std::int64_t> on_cpu, std::int64_t max, std::int64_t example) {
  return {.name = std::move(name),
          .help = std::move(help),
          .max = max,
          .default_on_cuda = std::move(on_cuda),
          .default_on_cpu = std::move(on_cpu),
          .example = example};
}

SizeField rare_size(std::string name, std::string help, std::int64_t max, std::int64_t example,
                    WhenAbsent when_absent) {
  return {.name = std::move(name),
          .help = std::move(help),
          .max = max,
          .example = example,
          .rare = true,
          .when_absent = std::move(when_absent)};
}

SizeField neutral(SizeField field) {
  field.performance_neutral = true;
  return field;
}

SizeField kv_heads_size(std::string help, std::int64_t max, std::int64_t example) {
  SizeField field = rare_size("kv-heads", std::move(help) + "; heads if left out", max, example,
                              same_as("heads"));
  field.compared_when_absent = true;
  return field;
}

OptionField rare_option(std::string name, std::string help, std::vector<std::string> choices,
                        std::string pass) {
  return {.name = std::move(name),
          .help = std::move(help),
          .choices = std::move(choices),
          .rare = true,
          .pass = std::move(pass)};
}

OptionField rare_number(std::string name, std::string help, std::string usual, NumberRange range,
                        std::string pass) {
  OptionField field =
      rare_option(std::move(name), std::move(help), {std::move(usual)}, std::move(pass));
  field.number = range;
  return field;
}

SizeField product_tokens() {
  return token_count("m", "tokens", {1, 16, 64, 256, 1024, 4096, 16384}, {1, 16, 128, 512});
}

SizeField row_tokens() {
  return token_count("m", "tokens", {1, 64, 4096, 16384}, {1, 64, 4096});
}

OptionField y_scale_option() {
  return rare_option(
      "y-scale", "whether columns of y are multiplied by a factor each, before a residual is added",
      {"no", "yes"}, "fwd");
}

TensorSpec y_scale_tensor(std::int64_t n) {
  return {"y_scale", DType::f32, {n}, Role::input, 0.25, 0.75};
}

OptionField residual_option() {
  return rare_option("residual", "whether y is added to a residual of its size", {"no", "yes"},
                     "fwd");
}

OptionField batch_invariant_option() {
  return rare_option("batch-invariant",
                     "whether the bits of a row are the same whatever other rows there are",
                     {"no", "yes"}, "fwd");
}

bool is_batch_invariant(const Problem& problem) {
  return problem.has("batch-invariant", "yes");
}

OptionField accumulate_option(const std::string& of) {
  return rare_option(
      "accumulate",
      "whether the gradients of " + of + " are added to others, which may be the same buffers",
      {"no", "yes"}, "bwd");
}

bool accumulates(const Problem& problem) {
  return problem.has("accumulate", "yes");
}

std::string initial_name(std::string_view gradient) {
  return std::string(gradient) + "_before";
}

std::vector<TensorSpec> initial_values(std::vector<TensorSpec> gradients) {
  for (TensorSpec& tensor : gradients) {
    tensor.may_alias = std::exchange(tensor.name, initial_name(tensor.name));
    tensor.role = Role::input;
    tensor.sums_tokens = false;
    tensor.alike = 0;
  }
  return gradients;
}

OptionField frozen_option(const std::string& of) {
  return rare_option("frozen", "whether " + of + " have no gradients", {"no", "yes"}, "bwd");
}
bool is_frozen(const Problem& problem) {
  return problem.pass == "bwd" && problem.has("frozen", "yes");
}
std::string frozen_contradiction(const Problem& problem) {
  const bool both = problem.has("frozen", "yes") && problem.has("accumulate", "yes");
  return both ? "accumulate=yes with frozen=yes: nothing is added to" : "";
}

std::vector<OptionField> gated_save_options(const std::string& order) {
  return {
      rare_option("save", "saved for a backward pass: gate and up before the activation" + order,
                  {"none", "preact"}, "fwd"),
      rare_option("save",
                  "saved by the forward pass: gate and up before the activation" + order +
                      "; or its input, from which the backward pass computes them",
                  {"preact", "input"}, "bwd")};
}

bool recomputes(const Problem& problem) {
  return problem.pass == "bwd" && problem.has("save", "input");
}

bool stores_gates(const Problem& problem) {
  return problem.pass == "bwd" ? recomputes(problem) : problem.has("save", "preact");
}

TensorArgument tensor_of(const TensorPlaces& places, std::string_view name) {
  const std::size_t place = places.at(name);
  if (place == absent) throw Error(ErrorKind::internal, "no tensor is named " + std::string(name));
  return {place};
}

Program host_program(std::size_t tensors, HostFunction function) {
  return host_program(tensors, {}, std::move(function));
}

Program host_program(std::size_t tensors, std::vector<Scratch> scratch, HostFunction function) {
  Program program;
  program.host_tensors = tensors;
  program.scratch = std::move(scratch);
  program.steps.emplace_back(std::move(function));
  return program;
}

std::int64_t size_or(const Problem& problem, const std::string& name, std::int64_t otherwise) {
  const auto entry = problem.sizes.find(name);
  return entry == problem.sizes.end() ? otherwise : entry->second;
}

std::string option_or(const Problem& problem, const std::string& name,
                      const std::string& otherwise) {
  const auto entry = problem.options.find(name);
  return entry == problem.options.end() ? otherwise : entry->second;
}

namespace {

/// The numbers that an op's options have by default. Making all options takes as long as the rest
/// of what a plan asks of an op.
class NumberDefaults {
 public:
  /// `op` is one of the catalog, which live as long as the program.
  std::optional<double> of(const Op& op, std::string_view name) {
    const std::lock_guard lock(mutex_);
    const auto [known, is_new] = defaults_.try_emplace(&op);
    if (is_new)
      for (const auto& field : op.options())
        if (const auto number = parse_number(field.choices.front()))
          known->second.emplace(field.name, *number);
    const auto found = known->second.find(name);
    return found == known->second.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  std::mutex mutex_;
  std::map<const Op*, std::map<std::string, double, std::less<>>> defaults_;
};

}  // namespace

double number_or_default(const Op& op, const Problem& problem, std::string_view name) {
  if (problem.options.contains(std::string(name))) return problem.number(name);
  static NumberDefaults defaults;
  if (const auto number = defaults.of(op, name)) return *number;
  throw Error(ErrorKind::internal, "no number is named " + std::string(name));
}

}  // namespace fftune
