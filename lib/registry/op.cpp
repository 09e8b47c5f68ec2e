#include "registry/op.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/distribution.hpp"
#include "core/error.hpp"
#include "core/lookup.hpp"
#include "core/saturated.hpp"
#include "core/split.hpp"

namespace fftune {
namespace {

template <typename Names, typename Name>
bool has(const Names& names, const Name& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

[[noreturn]] void reject(const Op& op, const std::string& what) {
  throw Error(ErrorKind::invalid_input, fmt::format("{}: {}", op.name(), what));
}

template <typename Fields>
std::string field_names(const Fields& fields) {
  std::string names;
  for (const auto& field : fields) names += (names.empty() ? "" : ", ") + field.name;
  return names;
}

void check_sizes(const Op& op, const Problem& problem) {
  const auto fields = op.sizes();
  for (const auto& [name, value] : problem.sizes) {
    const auto field = std::find_if(fields.begin(), fields.end(),
                                    [&, &name = name](const auto& f) { return f.name == name; });
    if (field == fields.end())
      reject(op, fmt::format("there is no size '{}': sizes are {}", name, field_names(fields)));
    if (value < 1 || value > field->max)
      reject(op, fmt::format("{}={} is out of range: use 1 to {}", name, value, field->max));
  }
  for (const auto& field : fields)
    if (needs_size(field, problem) && !problem.sizes.contains(field.name))
      reject(op, fmt::format("size '{}' ({}) is missing", field.name, field.help));
}

/// The number in its shortest form, so that "1e-6" and "0.000001" are one problem.
std::string canonical_number(const Op& op, const OptionField& field, const std::string& text) {
  const auto number = parse_number(text);
  if (!number || !(*number >= field.number->least && *number <= field.number->most))
    reject(op, fmt::format("{}={} is out of range: use {}", field.name, text, choices_text(field)));
  return fmt::format("{}", *number);
}

/// The value that was parsed from the text of an option, which must be one of its kind.
template <class Value>
const Value& parsed(const std::optional<Value>& value, const char* kind, const Op& op,
                    const OptionField& field, const std::string& text) {
  if (!value)
    reject(op,
           fmt::format("{}={} is not a {}: use {}", field.name, text, kind, choices_text(field)));
  return *value;
}

/// Sorts the parts between commas, behind a name and a colon if there are such.
std::string canonical_text(const std::string& text) {
  const std::size_t colon = text.find(':'), first = colon == std::string::npos ? 0 : colon + 1;
  auto parts = split_at_commas(std::string_view(text).substr(first));
  std::sort(parts.begin(), parts.end());
  return text.substr(0, first) + fmt::format("{}", fmt::join(parts, ","));
}

void check_options(const Op& op, Problem& problem) {
  const auto fields = options_of(op, problem.pass);
  for (auto& [name, value] : problem.options) {
    const auto field = std::find_if(fields.begin(), fields.end(),
                                    [&, &name = name](const auto& f) { return f.name == name; });
    if (field == fields.end()) {
      const auto all = op.options();
      const bool elsewhere = std::any_of(
          all.begin(), all.end(), [&, &name = name](const auto& f) { return f.name == name; });
      reject(op, fmt::format("there is no option '{}'{}: options are {}", name,
                             elsewhere ? " in pass " + problem.pass : "", field_names(fields)));
    }
    if (field->number)
      value = canonical_number(op, *field, value);
    else if (field->pattern)
      value = pattern_text(parsed(parse_pattern(value), "pattern", op, *field, value));
    else if (field->routing)
      value = routing_text(parsed(parse_routing(value), "routing", op, *field, value));
    else if (field->is_text())
      value = canonical_text(value);
    else if (!has(field->choices, value))
      reject(op, fmt::format("{}={} is not a choice: use {}", name, value, choices_text(*field)));
  }
  for (const auto& field : fields) {
    const auto& usual = field.choices.front();
    const auto entry = problem.options.try_emplace(field.name, usual).first;
    if (field.rare && entry->second == usual) problem.options.erase(entry);
  }
}

/// Beyond this, offsets in a tensor do not fit in 64 bits. A tensor that fits there may still not
/// fit in a device's memory, which the device reports.
constexpr std::int64_t most_elements = std::int64_t{1} << 62;

void check_extents(const Op& op, const Problem& problem) {
  for (const auto& tensor : op.tensors(problem))
    if (tensor.elements() > most_elements)
      reject(op, fmt::format("{} has more than 2^62 elements: use smaller sizes or strides",
                             tensor.name));
}

}  // namespace

const std::string& OpPart::tensor(const std::string& own) const {
  const auto renamed = names.find(own);
  return renamed == names.end() ? own : renamed->second;
}

std::string OpPart::stage(std::string_view own) const {
  return fmt::format("{}.{}", name, own);
}

Problem unrepeated(const Op& op, const Problem& problem) {
  auto repetition = op.repetition(problem);
  return repetition ? std::move(repetition->one) : problem;
}

bool has_nested_parts(const Op& op, const Problem& problem) {
  const auto parts = op.parts(problem);
  return std::any_of(parts.begin(), parts.end(),
                     [](const OpPart& part) { return !part.op->parts(part.problem).empty(); });
}

std::vector<OptionField> options_of(const Op& op, std::string_view pass) {
  auto fields = op.options();
  std::erase_if(fields,
                [&](const auto& field) { return !field.pass.empty() && field.pass != pass; });
  return fields;
}

std::string choices_text(const OptionField& field) {
  if (field.number)
    return fmt::format("a number from {} to {}", field.number->least, field.number->most);
  if (field.pattern)
    return "all, none, or block:SHARE, tail:SHARE, even:SHARE, random:SHARE with a share from 0 "
           "to 1";
  if (field.routing)
    return "uniform, or zipf:SKEW with a skew from 0 to 4, or file:IDS, a text file of ids";
  if (field.is_text()) return "a text";
  return fmt::format("{}", fmt::join(field.choices, ", "));
}

std::string_view role_name(Role role) {
  using enum Role;
  return value_of<Role, std::string_view>(
      role,
      {{input, "input"}, {updated, "updated"}, {output, "output"}, {intermediate, "intermediate"}});
}

std::int64_t TensorSpec::elements() const {
  std::int64_t elements = 1;
  for (const auto extent : shape) elements = saturated_product(elements, extent);
  return elements;
}

std::size_t TensorSpec::bytes() const {
  std::size_t bytes = 0;
  return __builtin_mul_overflow(static_cast<std::size_t>(elements()), dtype_bytes(dtype), &bytes)
             ? std::numeric_limits<std::size_t>::max()
             : bytes;
}

Cost cost_of(const Op& op, const Problem& problem) {
  Cost cost;
  const auto stages = op.stages(problem);
  for (const auto& stage : stages) cost.flops += stage.flops;
  if (stages.size() == 1) {
    cost.bytes = stages.front().bytes;
    return cost;
  }
  for (const auto& tensor : op.tensors(problem))
    if (tensor.role != Role::intermediate)
      cost.bytes += tensor.read_share * static_cast<double>(tensor.bytes());
  return cost;
}

std::size_t kept_bytes(const std::vector<TensorSpec>& tensors) {
  std::size_t bytes = 0;
  for (const auto& tensor : tensors)
    if (tensor.kept) bytes += tensor.bytes();
  return bytes;
}

std::optional<std::int64_t> size_or_absent(const SizeField& field, const Problem& problem) {
  const auto stated = problem.sizes.find(field.name);
  if (stated != problem.sizes.end()) return stated->second;
  return field.when_absent ? field.when_absent(problem) : std::nullopt;
}

Problem without_defaults(const std::vector<SizeField>& fields, std::string_view token_size,
                         Problem problem) {
  constexpr std::int64_t other_tokens = 4099;
  for (const SizeField& field : fields) {
    const auto stated = problem.sizes.find(field.name);
    if (stated == problem.sizes.end() || !field.when_absent) continue;
    Problem absent = problem;
    absent.sizes.erase(field.name);
    if (field.when_absent(absent) == stated->second &&
        field.when_absent(absent.with_size(token_size, other_tokens)) == stated->second)
      problem = std::move(absent);
  }
  return problem;
}

Problem canonical(const Op& op, Problem problem, DeviceKind kind) {
  if (problem.op != op.name()) reject(op, fmt::format("the problem is of op '{}'", problem.op));
  if (problem.pass.empty()) problem.pass = op.passes().front();
  if (!has(op.passes(), problem.pass))
    reject(op, fmt::format("there is no pass '{}': use {}", problem.pass,
                           fmt::join(op.passes(), " or ")));
  const auto dtypes = op.dtypes_of_pass(kind, problem.pass);
  if (!has(dtypes, problem.dtype)) {
    std::vector<std::string_view> names;
    for (const auto dtype : dtypes) names.push_back(dtype_name(dtype));
    const bool in_no_pass = !has(op.dtypes(kind), problem.dtype);
    reject(op, fmt::format("dtype {} is not supported on {}{}: use {}", dtype_name(problem.dtype),
                           kind == DeviceKind::cpu ? "the CPU" : "CUDA",
                           in_no_pass ? "" : " in pass " + problem.pass, fmt::join(names, ", ")));
  }
  check_sizes(op, problem);
  check_options(op, problem);
  problem = without_defaults(op.sizes(), op.token_size(), std::move(problem));
  if (const auto contradiction = op.contradiction(problem); !contradiction.empty())
    reject(op, contradiction);
  check_extents(op, problem);
  return problem;
}

std::optional<std::size_t> find_tensor(const std::vector<TensorSpec>& tensors,
                                       std::string_view name) {
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].name == name) return i;
  return std::nullopt;
}

std::size_t tensor_index(const std::vector<TensorSpec>& tensors, std::string_view name) {
  if (const auto place = find_tensor(tensors, name)) return *place;
  throw Error(ErrorKind::internal, fmt::format("no tensor '{}'", name));
}

}  // namespace fftune
