#include "kernels/common/op_parts.hpp"

#include <functional>
#include <map>
#include <mutex>

#include "core/error.hpp"

namespace fftune {

std::vector<DType> float_dtypes(DeviceKind kind) {
  if (kind == DeviceKind::cpu) return {DType::f32, DType::bf16};
  return {DType::bf16, DType::fp16, DType::f32};
}

SizeField product_tokens() {
  return {.name = "m",
          .help = "tokens",
          .default_on_cuda = {1, 16, 64, 256, 1024, 4096, 16384},
          .default_on_cpu = {1, 16, 128, 512}};
}

SizeField row_tokens() {
  return {.name = "m",
          .help = "tokens",
          .default_on_cuda = {1, 64, 4096, 16384},
          .default_on_cpu = {1, 64, 4096}};
}

OptionField y_scale_option() {
  return {
      .name = "y-scale",
      .help = "whether columns of y are multiplied by a factor each, before a residual is added",
      .choices = {"no", "yes"},
      .rare = true,
      .pass = "fwd"};
}

TensorSpec y_scale_tensor(std::int64_t n) {
  return {"y_scale", DType::f32, {n}, Role::input, 0.25, 0.75};
}

OptionField residual_option() {
  return {.name = "residual",
          .help = "whether y is added to a residual of its size",
          .choices = {"no", "yes"},
          .rare = true,
          .pass = "fwd"};
}

OptionField batch_invariant_option() {
  return {.name = "batch-invariant",
          .help = "whether the bits of a row are the same whatever other rows there are",
          .choices = {"no", "yes"},
          .rare = true,
          .pass = "fwd"};
}

bool is_batch_invariant(const Problem& problem) {
  return problem.has("batch-invariant", "yes");
}

OptionField accumulate_option(const std::string& of) {
  return {.name = "accumulate",
          .help = "whether the gradients of " + of +
                  " are added to others, which may be the same buffers",
          .choices = {"no", "yes"},
          .rare = true,
          .pass = "bwd"};
}

std::vector<OptionField> gated_save_options(const std::string& order) {
  return {{.name = "save",
           .help = "written for a backward pass: gate and up before the activation" + order,
           .choices = {"none", "preact"},
           .rare = true,
           .pass = "fwd"},
          {.name = "save",
           .help = "kept by the forward pass: gate and up before the activation" + order +
                   ", or its input alone, from which they are computed again",
           .choices = {"preact", "input"},
           .rare = true,
           .pass = "bwd"}};
}

std::vector<const Family*> joined(std::initializer_list<std::vector<const Family*>> lists) {
  std::vector<const Family*> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

TensorArgument tensor_of(const TensorPlaces& places, std::string_view name) {
  const std::size_t place = places.at(name);
  if (place == absent) throw Error(ErrorKind::internal, "no tensor is named " + std::string(name));
  return {place};
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
