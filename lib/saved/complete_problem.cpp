// The sizes and options that a saved model gives a problem, and whether a problem fits the model.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "core/fail.hpp"
#include "core/nearest.hpp"
#include "saved/inputs.hpp"
#include "saved/language_model.hpp"

namespace fftune {
namespace {

std::vector<std::string> factors_of(std::string_view extent) {
  std::vector<std::string> factors;
  for (std::size_t begin = 0; begin < extent.size();) {
    const std::size_t end = std::min(extent.find('*', begin), extent.size());
    factors.emplace_back(extent.substr(begin, end - begin));
    begin = end + 1;
  }
  return factors;
}

}  // namespace

bool SavedInputs::tells(std::string_view size) const {
  if (table_ == nullptr || !model_) return false;
  for (const SavedInput& input : table_->inputs)
    for (const std::string_view extent : input.extents) {
      const auto factors = factors_of(extent);
      if (std::find(factors.begin(), factors.end(), size) != factors.end()) return true;
    }
  return std::any_of(table_->sizes.begin(), table_->sizes.end(),
                     [&](const ConfigField& field) { return field.field == size; });
}

void SavedInputs::require_any() const {
  if (table_ == nullptr || !model_) return;
  for (const SavedInput& input : table_->inputs)
    if (find(input.tensor)) return;
  fail_missing(table_->inputs.front(), layer_);
}

void SavedInputs::require_fit(const Problem& problem) const {
  const auto tensors = op_->tensors(problem);
  std::set<std::string> used;
  bool any_recorded = false;
  for (const TensorSpec& spec : tensors) {
    if (spec.role != Role::input && spec.role != Role::updated) continue;
    const auto [name, layer] = split_layer(spec.name);
    if (const auto packed = packed_name(spec); packed && find(packed->weight)) {
      used.emplace(split_layer(packed->weight).first);
      require_packable(*packed, spec, problem);
      continue;
    }
    if (const auto source = find(spec.name)) {
      used.emplace(name);
      any_recorded |= source->recorded;
      first_row(*source, spec);
      continue;
    }
    const SavedInput* const input = table_ && model_ ? find_saved_input(*table_, name) : nullptr;
    if (input != nullptr) fail_missing(*input, layer_ + layer);
  }
  std::vector<std::string> inputs;
  for (const TensorSpec& spec : tensors)
    if (spec.role == Role::input) inputs.emplace_back(split_layer(spec.name).first);
  if (input_ && !any_recorded)
    fail("{} has none of the inputs of {}, {}: name them so in the file, or by {}", options_.input,
         problem.text(), fmt::join(inputs, ", "), option("map"));
  for (const auto& [input, name] : map_)
    if (!used.contains(input)) {
      const std::string near = nearest(input, inputs);
      fail("{} names '{}', which is not an input of {}{}: they are {}", option("map"), input,
           problem.text(), near.empty() ? "" : fmt::format(" (did you mean {}?)", near),
           fmt::join(inputs, ", "));
    }
  require_all_rows_used(problem);
}

void SavedInputs::require_all_rows_used(const Problem& problem) const {
  std::map<const SavedModel::Tensor*, std::int64_t> rows;
  for (const TensorSpec& spec : op_->tensors(problem))
    if (const auto source =
            spec.role == Role::input && !packed_name(spec) ? find(spec.name) : std::nullopt;
        source && source->rows != SavedRows::all &&
        !is_of_each_expert(source->rows, shape_of(*source), spec.shape))
      rows[source->parts.front()] += spec.shape.at(0);
  for (const auto& [tensor, used] : rows) {
    const auto& shape = tensor->saved.shape;
    const std::int64_t all = is_transposed(tensor->saved) ? shape.back() : shape.at(0);
    if (used != all)
      fail("{} has {} rows, and {} uses {} of them: give other sizes", tensor->saved.name, all,
           problem.text(), used);
  }
}

void SavedInputs::infer_sizes(std::map<std::string, std::int64_t, std::less<>>& sizes) const {
  for (bool found = true; found;) {
    found = false;
    for (const SavedInput& input : table_->inputs) {
      const auto source = find(input.tensor);
      if (!source || source->recorded) continue;
      auto shape = shape_of(*source);
      auto extents = input.extents;
      // Matrices of a mixture, by the name that a network's have.
      if (shape.size() == extents.size() + 1) extents.insert(extents.begin(), "experts");
      if (shape.size() != extents.size()) continue;
      const bool half = source->rows == SavedRows::first_half ||
                        source->rows == SavedRows::second_half || source->rows == SavedRows::even ||
                        source->rows == SavedRows::odd;
      if (half) shape[extents[0] == "experts" ? 1 : 0] /= 2;
      // If q, k and v are in one tensor, no extent gives the rows of each.
      const bool mixed = source->rows != SavedRows::all && !half;
      for (std::size_t i = mixed ? 1 : 0; i < shape.size(); ++i) {
        std::int64_t left = shape[i];
        std::vector<std::string> open;
        for (const std::string& factor : factors_of(extents[i])) {
          const auto size = sizes.find(factor);
          if (size == sizes.end())
            open.push_back(factor);
          else
            left = left % size->second == 0 ? left / size->second : 0;
        }
        if (open.size() == 1 && left > 0) found |= sizes.emplace(open.front(), left).second;
      }
    }
  }
}

void SavedInputs::complete(GivenProblem& given, DeviceKind kind) const {
  if (table_ == nullptr || !model_) return;
  if (table_->is_whole && !config_.refusal().empty())
    fail("{}: {}", options_.weights, config_.refusal());
  const auto is_given = [](const std::map<std::string, std::string>& values,
                           const std::string& name) {
    const auto entry = values.find(name);
    return entry != values.end() && !entry->second.empty();
  };
  std::map<std::string, std::int64_t, std::less<>> sizes;
  for (const auto& [name, text] : given.sizes)
    if (const auto number = whole_number(text)) sizes.emplace(name, *number);
  infer_sizes(sizes);
  for (const ConfigField& field : table_->sizes)
    if (const auto text = config_.value(field))
      if (const auto number = whole_number(*text)) sizes.emplace(field.field, *number);
  infer_sizes(sizes);
  if (table_->op == "decode") {
    if (find_in_model(*model_, prefix_, positions_name) != nullptr)
      fail("{} learns its positions, which the op decode does not add: use the ops layer and head",
           options_.weights);
    sizes.emplace("layers", count_layers(*model_));
  }
  for (const SizeField& field : op_->sizes()) {
    const auto size = sizes.find(field.name);
    if (size == sizes.end() || field.name == op_->token_size() || is_given(given.sizes, field.name))
      continue;
    given.sizes[field.name] = fmt::format("{}", size->second);
  }

  const std::string pass = given.pass.empty() ? op_->passes().at(0) : given.pass;
  const auto fields = options_of(*op_, pass);
  // Whether the op has the value, or no such option.
  const auto set = [&](std::string_view option, const std::string& value) {
    const std::string name(option);
    const auto field = std::find_if(fields.begin(), fields.end(),
                                    [&](const OptionField& each) { return each.name == name; });
    if (field == fields.end() || is_given(given.options, name)) return true;
    const auto& choices = field->choices;
    const bool has =
        field->number || std::find(choices.begin(), choices.end(), value) != choices.end();
    if (has) given.options[name] = value;
    return has;
  };
  // Quantised weights stay as they are saved, but for fp8 where the op has that type.
  const auto type = [&]() -> std::optional<DType> {
    const auto weight = find(table_->inputs.front().tensor);
    const auto dtype =
        weight ? dtype_of(weight->parts.front()->saved.element) : std::optional<DType>();
    const auto all = op_->dtypes_of_pass(kind, pass);
    const bool is_there = dtype && std::find(all.begin(), all.end(), *dtype) != all.end();
    return is_there ? dtype : std::nullopt;
  };
  const std::string fp8(dtype_name(DType::fp8));
  const bool is_fp8 = given.dtypes.empty() ? type() == DType::fp8 : given.dtypes == fp8;
  const bool has_own = is_given(given.options, "weights");
  if (const auto own = !is_fp8 || has_own ? packing() : std::nullopt;
      own && (!has_own || given.options["weights"] == own->format.weights)) {
    for (const auto& [name, word] : option_words(own->format)) set(name, word);
    if (own->dense_attention) set("attn-weights", "dense");
  }
  const bool packs = is_given(given.options, "weights") && given.options["weights"] != "dense";

  for (const SavedOption& option : table_->options) {
    if (packs && option.option == "gate-up") continue;
    if (option.name.empty() ? find(option.tensor).has_value()
                            : model_->find(prefix(layer_) + std::string(option.name)) != nullptr)
      set(option.option, std::string(option.value));
  }
  for (const ConfigField& field : table_->settings) {
    const std::string needs(field.needs);
    if (!needs.empty() && (!is_given(given.options, needs) || given.options[needs] == "none" ||
                           given.options[needs] == "no"))
      continue;
    if (is_given(given.options, std::string(field.not_with)) &&
        given.options[std::string(field.not_with)] == "none")
      continue;
    auto value = config_.value(field);
    // In the model's own type, as transformers has it.
    if (value && field.field == "embed-scale" && given.dtypes.find(',') == std::string::npos)
      value = fmt::format("{}", rounded(parse_number(*value).value_or(1),
                                        given.dtypes.empty() ? type().value_or(DType::f32)
                                                             : parse_dtype(given.dtypes)));
    // Words of model_type are those of a few models.
    const bool of_few =
        std::find(field.keys.begin(), field.keys.end(), "model_type") != field.keys.end();
    if (value && !set(field.field, *value) && !of_few)
      fail("config.json has {} {}, which {} does not have: give {}", config_.key(field), *value,
           op_->name(), option(field.field));
  }

  if (given.dtypes.empty())
    if (const auto dtype = type(); dtype && (!packs || *dtype != DType::fp8))
      given.dtypes = dtype_name(*dtype);
}

}  // namespace fftune
