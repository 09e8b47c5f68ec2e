#include "saved/inputs.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "core/error.hpp"
#include "core/fail.hpp"
#include "core/nearest.hpp"
#include "core/split.hpp"
#include "device/parallel.hpp"
#include "saved/language_model.hpp"

namespace fftune {
namespace {

std::string replaced(std::string_view text, char mark, std::int64_t number) {
  std::string result(text);
  if (const auto place = result.find(mark); place != result.npos)
    result.replace(place, 1, fmt::format("{}", number));
  return result;
}

std::int64_t elements_of(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

/// Row-major `rows` x `columns` from its transpose.
void transpose(const std::byte* in, std::byte* out, std::int64_t rows, std::int64_t columns,
               std::size_t bytes, Parallel& parallel) {
  const auto width = static_cast<std::size_t>(columns), height = static_cast<std::size_t>(rows);
  for_each_row(height, width, parallel, [&](std::size_t row) {
    for (std::size_t column = 0; column < width; ++column)
      std::memcpy(out + (row * width + column) * bytes, in + (column * height + row) * bytes,
                  bytes);
  });
}

/// Elements of a saved tensor from `first` on, rounded to `dtype`.
void read_as(const SavedModel& model, const SavedModel::Tensor& tensor, std::int64_t first,
             DType dtype, std::byte* out, std::int64_t count, Parallel& parallel) {
  for_each_block(count, 1, parallel, [&](const Block& block) {
    const auto begin = static_cast<std::size_t>(block.first_row);
    const std::size_t size = static_cast<std::size_t>(block.last_row) - begin;
    model.read(tensor, static_cast<std::size_t>(first) + begin, dtype,
               out + begin * dtype_bytes(dtype), size);
  });
}

bool is_zero(const SavedModel& model, const SavedModel::Tensor& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.saved.elements()));
  model.read(tensor, 0, DType::f32, reinterpret_cast<std::byte*>(values.data()), values.size());
  return std::all_of(values.begin(), values.end(), [](float value) { return value == 0; });
}

}  // namespace

SavedInputs::SavedInputs(const Catalog& catalog, const Op& op, SavedValues values)
    : catalog_(&catalog),
      op_(&op),
      table_(find_saved_op(op.name())),
      options_(std::move(values)),
      layer_(options_.layer.value_or(0)) {
  if (!options_.input.empty()) input_.emplace(options_.input);
  if (!options_.weights.empty()) {
    model_ = std::make_shared<const SavedModel>(options_.weights);
    open_layer();
  }
  parse_map(options_.map);
}

SavedInputs::SavedInputs(const Catalog& catalog, const Op& op,
                         std::shared_ptr<const SavedModel> model, std::int64_t layer,
                         std::string map)
    : catalog_(&catalog),
      op_(&op),
      table_(find_saved_op(op.name())),
      options_{.weights = model->path().string(), .map = std::move(map)},
      of_tool_(false),
      layer_(layer),
      model_(std::move(model)) {
  if (layer < 0 || layer > most_layers)
    fail("layer {} is none: give one from 0 to {}", layer, most_layers);
  if (layer > 0) options_.layer = layer;
  open_layer();
  parse_map(options_.map);
}

std::string SavedInputs::option(std::string_view name) const {
  return fmt::format("{}{}", of_tool_ ? "--" : "", name);
}

std::string SavedInputs::weights_option() const {
  return of_tool_ ? "--saved-weights and --weights" : "weights";
}

void SavedInputs::open_layer() {
  if (model_->config() != nullptr) config_ = LayerConfig(*model_->config(), layer_);
  const std::string_view found = layer_prefix(*model_, layer_);
  if (!found.empty()) {
    prefix_ = found;
    return;
  }
  if (const std::int64_t count = count_layers(*model_); count > 0)
    fail("{} has no layer {}: give {} from 0 to {}", options_.weights, layer_, option("layer"),
         count - 1);
  if (options_.layer)
    fail(
        "{} has no layers by a name that is known: leave {} out, and give whole names by "
        "{}",
        options_.weights, option("layer"), option("map"));
}

void SavedInputs::parse_map(const std::string& text) {
  if (text.empty()) return;
  for (const std::string_view pair : split_at_commas(text)) {
    if (pair.empty())
      fail("{} '{}' has an empty part: give values with commas between them", option("map"), text);
    const auto sign = pair.find('=');
    if (sign == 0 || sign == pair.npos || sign + 1 == pair.size())
      fail("{} '{}' is not a pair: give INPUT=TENSOR, as in w=mlp.up_proj.weight", option("map"),
           pair);
    if (!map_.emplace(pair.substr(0, sign), pair.substr(sign + 1)).second)
      fail("{} gives {} twice", option("map"), pair.substr(0, sign));
  }
  for (const auto& [input, name] : map_) mapped(name, layer_);
}

std::string SavedInputs::prefix(std::int64_t layer) const {
  return replaced(prefix_, '#', layer);
}

bool SavedInputs::is_transposed(const SavedTensor& tensor) const {
  if (is_stack_of_experts(tensor.name)) return model_ && model_->find(tensor.name + "_bias");
  if (!is_conv1d(tensor.name) || tensor.shape.size() != 2) return false;
  // GPT-BigCode has plain linear layers by these names: a bias tells which extent is the output.
  std::string bias = tensor.name;
  bias.replace(bias.rfind("weight"), 6, "bias");
  const auto* found = model_ ? model_->find(bias) : nullptr;
  return found == nullptr || found->saved.shape.empty() || found->saved.shape[0] == tensor.shape[1];
}

SavedInputs::Source SavedInputs::mapped(const std::string& given, std::int64_t layer) const {
  constexpr std::string_view mark = "^T";
  const bool turned = given.ends_with(mark);
  const std::string name = turned ? given.substr(0, given.size() - mark.size()) : given;
  if (input_)
    if (const auto* tensor = input_->find(name))
      return {.parts = {tensor}, .transposed = turned, .recorded = true};
  if (!model_) return {.parts = {&input_->at(name)}, .transposed = turned, .recorded = true};
  const auto* tensor = model_->find(prefix(layer) + name);
  if (tensor == nullptr) tensor = model_->find(name);
  // A missing prefix is added, so that the error suggests the nearest full name.
  if (tensor == nullptr) {
    const bool whole = name.starts_with(prefix(layer));
    tensor = &model_->at(whole ? name : prefix(layer) + name);
  }
  return {.parts = {tensor}, .transposed = turned || is_transposed(tensor->saved)};
}

std::optional<SavedInputs::Source> SavedInputs::named(const SavedName& name,
                                                      std::int64_t layer) const {
  Source source{.parts = {}, .rows = name.rows};
  for (const std::string_view each : name.names) {
    const std::string whole = prefix(layer) + std::string(each);
    source.experts = whole.find('*') != whole.npos;
    for (std::int64_t expert = 0;; ++expert) {
      const auto* tensor = model_->find(source.experts ? replaced(whole, '*', expert) : whole);
      if (tensor == nullptr) {
        if (source.experts && model_->find(replaced(whole, '*', expert + 1)))
          fail("{} has {}, but not {}: its experts are not complete", options_.weights,
               replaced(whole, '*', expert + 1), replaced(whole, '*', expert));
        if (source.experts && expert > 0) break;
        return {};
      }
      source.parts.push_back(tensor);
      if (!source.experts) break;
    }
  }
  source.transposed = is_transposed(source.parts.front()->saved);
  // gpt-oss, which alone has experts so, has the rows of gate and up in turn.
  if (source.transposed && is_stack_of_experts(source.name())) {
    if (source.rows == SavedRows::first_half) source.rows = SavedRows::even;
    if (source.rows == SavedRows::second_half) source.rows = SavedRows::odd;
  }
  return source;
}

std::optional<SavedInputs::Source> SavedInputs::known(const SavedInput& input,
                                                      std::int64_t layer) const {
  if (!model_) return {};
  for (const SavedName& name : input.names) {
    if (input.of_model) {
      if (const auto* tensor = find_in_model(*model_, prefix_, name.names.front()))
        return Source{.parts = {tensor}};
    } else if (auto source = named(name, layer)) {
      return source;
    }
  }
  if (input.bias_of.empty()) return {};
  auto source = find(fmt::format("layers.{}.{}", layer - layer_, input.bias_of));
  if (!source || source->recorded) return {};
  for (const auto*& part : source->parts) {
    std::string name = part->saved.name;
    const auto place = name.rfind(".weight");
    if (place == name.npos || place + 7 != name.size()) return {};
    part = model_->find(name.replace(place, 7, ".bias"));
    if (part == nullptr) return {};
  }
  source->transposed = false;
  return source;
}

std::optional<SavedInputs::Source> SavedInputs::find(std::string_view tensor) const {
  const auto [name, layer] = split_layer(tensor);
  if (const auto entry = map_.find(name); entry != map_.end())
    return mapped(entry->second, layer_ + layer);
  if (input_)
    if (const auto* found = input_->find(tensor)) return Source{.parts = {found}, .recorded = true};
  const SavedInput* const input = table_ ? find_saved_input(*table_, name) : nullptr;
  return input ? known(*input, layer_ + layer) : std::nullopt;
}

bool SavedInputs::has_weights() const {
  if (table_ == nullptr) return false;
  if (model_ && !table_->foreign.empty() &&
      model_->find(prefix(layer_) + std::string(table_->foreign)))
    return false;
  // The first is what the op is about.
  return find(table_->inputs.front().tensor).has_value();
}

std::string SavedInputs::why_not() const {
  if (table_ == nullptr || !model_) return "";
  if (table_->is_whole && !config_.refusal().empty()) return config_.refusal();
  for (const SavedInput& input : table_->inputs)
    if (const auto source = find(input.tensor))
      for (const auto* part : source->parts) try {
          if (!source->recorded && part->quantised) model_->code_format(*part);
        } catch (const Error& error) {
          if (error.kind() != ErrorKind::invalid_input) throw;
          return error.what();
        }
  return "";
}

std::vector<std::int64_t> SavedInputs::shape_of(const Source& source) const {
  if (!source.recorded)
    for (const auto* part : source.parts) model_->require_readable(*part);
  std::vector<std::int64_t> shape = source.parts.front()->saved.shape;
  for (const auto* part : source.parts) {
    const auto& other = part->saved.shape;
    const bool stacks = !source.experts && !shape.empty() && shape.size() == other.size() &&
                        std::equal(shape.begin() + 1, shape.end(), other.begin() + 1);
    if (!stacks && other != shape)
      fail("{} is {} and {} is {}: they do not go together", source.name(), shape_text(shape),
           part->saved.name, shape_text(other));
    if (stacks && part != source.parts.front()) shape[0] += other[0];
  }
  if (source.transposed && shape.size() >= 2) std::swap(shape.back(), shape[shape.size() - 2]);
  if (source.experts) shape.insert(shape.begin(), std::ssize(source.parts));
  return shape;
}

std::int64_t SavedInputs::first_row(const Source& source, const TensorSpec& spec) const {
  const auto shape = shape_of(source);
  if (is_of_each_expert(source.rows, shape, spec.shape)) return 0;
  const auto refuse = [&] {
    fail("{} of {} is {}, but {} in {} is {}: give other sizes, or none", spec.name, op_->name(),
         shape_text(spec.shape), source.name(), source.recorded ? options_.input : options_.weights,
         shape_text(shape));
  };
  // A single number may have any number of dimensions.
  if (spec.elements() == 1 && elements_of(shape) == 1) return 0;
  const std::int64_t rows = spec.shape.at(0);
  const auto tail = spec.shape.size() - 1;
  const bool same_tail =
      shape.size() >= spec.shape.size() &&
      std::equal(spec.shape.begin() + 1, spec.shape.end(), shape.end() - static_cast<long>(tail));
  if (!same_tail) refuse();
  const std::int64_t row = elements_of({spec.shape.begin() + 1, spec.shape.end()});
  // Recorded activations are [batch, tokens, features], or of fewer tokens.
  if (source.recorded) {
    if (row == 0 || elements_of(shape) < row) refuse();
    return 0;
  }
  if (shape.size() != spec.shape.size()) refuse();
  const std::int64_t all = shape[0];
  switch (source.rows) {
    case SavedRows::all:
      if (all != rows) refuse();
      return 0;
    case SavedRows::first_half:
    case SavedRows::second_half:
      if (all != 2 * rows) refuse();
      return source.rows == SavedRows::first_half ? 0 : rows;
    case SavedRows::even:
    case SavedRows::odd:
      refuse();
      return 0;
    case SavedRows::q:
      if (all < rows) refuse();
      return 0;
    case SavedRows::k:
      if (all < 2 * rows) refuse();
      return all - 2 * rows;
    case SavedRows::v:
      if (all < rows) refuse();
      return all - rows;
  }
  return 0;
}

bool SavedInputs::fill(const TensorSpec& spec, std::span<std::byte> out, Parallel& parallel) const {
  if (const auto packed = packed_name(spec))
    if (const auto source = packed_source(*packed)) {
      pack(pack_weight(), coded(*source), packed->part, spec, out, parallel);
      return true;
    }
  const auto source = find(spec.name);
  if (!source) return false;
  fill_from(*source, spec, out, parallel);
  return true;
}

void SavedInputs::fill_from(const Source& source, const TensorSpec& spec, std::span<std::byte> out,
                            Parallel& parallel) const {
  const std::int64_t first = first_row(source, spec);
  const std::int64_t rows = spec.shape.at(0);
  const std::int64_t row = spec.elements() / std::max<std::int64_t>(rows, 1);
  const std::size_t bytes = dtype_bytes(spec.dtype);
  const auto at = [&](std::int64_t element) { return static_cast<std::size_t>(element); };
  const auto read = [&](const SavedModel::Tensor& tensor, std::int64_t from, std::int64_t count,
                        std::byte* to) {
    read_as(source.recorded ? *input_ : *model_, tensor, from, spec.dtype, to, count, parallel);
  };
  if (const auto shape = shape_of(source); is_of_each_expert(source.rows, shape, spec.shape)) {
    Source both = source;
    TensorSpec whole = spec;
    both.rows = SavedRows::all;
    whole.shape = shape;
    std::vector<std::byte> own(whole.bytes());
    fill_from(both, whole, own, parallel);
    const std::int64_t each = spec.shape[1], count = rows * each;
    const std::size_t size = out.size() / at(count);
    for (std::int64_t i = 0; i < count; ++i)
      std::memcpy(out.data() + at(i) * size,
                  own.data() + at(row_of_half(source.rows, i, each)) * size, size);
    return;
  }
  if (source.transposed) {
    const SavedModel::Tensor& tensor = *source.parts.front();
    const std::int64_t all = tensor.saved.elements();
    std::vector<std::byte> whole(at(all) * bytes), turned(at(all) * bytes);
    read(tensor, 0, all, whole.data());
    // Experts are filled one matrix at a time.
    const bool stacked = spec.shape.size() == 3;
    const std::int64_t width = stacked ? spec.shape.back() : row, each = stacked ? all / rows : all;
    for (std::int64_t first_of = 0; first_of < all; first_of += each)
      transpose(whole.data() + at(first_of) * bytes, turned.data() + at(first_of) * bytes,
                each / width, width, bytes, parallel);
    std::memcpy(out.data(), turned.data() + at(first * row) * bytes, out.size());
    return;
  }
  // End to end, the parts' elements; of recorded ones again from the first where they end.
  std::int64_t skipped = first * row;
  for (std::int64_t done = 0; done < spec.elements();)
    for (const auto* part : source.parts) {
      const std::int64_t there = part->saved.elements() / row * row;
      const std::int64_t begin = std::min(skipped, there);
      const std::int64_t count = std::min(there - begin, spec.elements() - done);
      skipped -= begin;
      read(*part, begin, count, out.data() + at(done) * bytes);
      done += count;
    }
}

std::optional<SavedInputs::Source> SavedInputs::packed_source(const PackedName& name) const {
  auto source = find(name.weight);
  const bool is_packed =
      source && !source->recorded &&
      std::all_of(source->parts.begin(), source->parts.end(),
                  [](const SavedModel::Tensor* part) { return part->quantised != nullptr; });
  return is_packed ? source : std::nullopt;
}

CodedMatrix SavedInputs::coded(const Source& source) const {
  std::vector<CodeFormat> formats;
  std::vector<std::int64_t> ends;  // rows of the parts up to each one's end
  CodedMatrix matrix{.k = source.parts.front()->quantised->code_columns()};
  for (const auto* part : source.parts) {
    formats.push_back(model_->code_format(*part));
    if (part->quantised->code_columns() != matrix.k)
      fail("{} has {} inputs and {} has {}: they do not go together", source.name(), matrix.k,
           part->saved.name, part->quantised->code_columns());
    ends.push_back((ends.empty() ? 0 : ends.back()) + part->saved.elements() / matrix.k);
  }
  matrix.format = common_format(formats);
  if (!matrix.format.unfit.empty())
    fail("{} in {} cannot be packed: {}", source.name(), options_.weights, matrix.format.unfit);
  matrix.n = ends.back();
  std::int64_t each = 0;
  if (source.rows != SavedRows::all) {
    matrix.n /= 2;
    const auto& shape = source.parts.front()->saved.shape;
    each = matrix.n / (shape.size() == 3 ? shape[0] : 1);
  }
  matrix.read = [this, source, ends, each](std::int64_t row, std::span<Code> codes) {
    if (each != 0) row = row_of_half(source.rows, row, each);
    const auto part = std::upper_bound(ends.begin(), ends.end(), row);
    const std::int64_t before = part == ends.begin() ? 0 : *(part - 1);
    model_->read_codes(*source.parts[static_cast<std::size_t>(part - ends.begin())],
                       static_cast<std::size_t>(row - before), codes);
  };
  return matrix;
}

void SavedInputs::require_packable(const PackedName& name, const TensorSpec& spec,
                                   const Problem& problem) const {
  const auto source = packed_source(name);
  if (!source)
    fail("{} of {} is packed, and {} in {} is not quantised: give {} dense", spec.name, op_->name(),
         find(name.weight)->name(), options_.weights, weights_option());
  if (source->rows == SavedRows::q || source->rows == SavedRows::k || source->rows == SavedRows::v)
    fail("{} has the rows of q, k and v, which cannot be packed apart", source->name());
  const CodedMatrix matrix = coded(*source);
  if (!problem.has("weights", matrix.format.weights))
    fail("{} of {} is packed as {}, and {} in {} is {}: give {} {}", spec.name, op_->name(),
         problem.option("weights"), source->name(), options_.weights, matrix.format.weights,
         weights_option(), matrix.format.weights);
  if (matrix.format.weights == "int4" && matrix.format.zeros && !problem.has("zeros", "yes"))
    fail("{} in {} has zero points: give {} yes", source->name(), options_.weights,
         option("zeros"));
  if (!fits(pack_weight(), matrix, name.part, spec))
    fail("{} in {} is [{}, {}] with groups of {}: give other sizes or {}, or none", source->name(),
         options_.weights, matrix.n, matrix.k,
         matrix.format.groups.front() == 0 ? "a row"
                                           : fmt::format("{}", matrix.format.groups.front()),
         option("group"));
}

std::optional<SavedInputs::Packing> SavedInputs::packing() const {
  std::vector<CodeFormat> formats;
  bool dense_attention = false, packed_attention = false;
  for (const SavedInput& input : table_->inputs) {
    // The embedding is dense, and so are the head and the router of a whole model.
    if (input.extents.size() < 2 || input.tensor == "w_router" || input.tensor.starts_with("b_") ||
        (input.of_model && input.tensor != table_->inputs.front().tensor))
      continue;
    const auto dense = find(input.tensor);
    if (!dense || dense->recorded) continue;
    const bool is_attention = input.tensor == "w_o" || input.tensor == "w_q" ||
                              input.tensor == "w_k" || input.tensor == "w_v" ||
                              input.tensor == "w_qkv";
    const auto source = packed_source({std::string(input.tensor)});
    if (!source) {
      if (!is_attention) return {};
      dense_attention = true;
      continue;
    }
    packed_attention |= is_attention;
    for (const auto* part : source->parts) formats.push_back(model_->code_format(*part));
  }
  if (formats.empty() || (dense_attention && packed_attention)) return {};
  Packing packing{common_format(formats), dense_attention};
  if (!packing.format.unfit.empty()) return {};
  return packing;
}

void SavedInputs::fail_missing(const SavedInput& input, std::int64_t layer) const {
  std::vector<std::string> names;
  for (const SavedName& each : input.names)
    names.push_back((input.of_model ? model_prefix(prefix_) : prefix(layer)) +
                    std::string(each.names.front()));
  if (!input.bias_of.empty()) names.push_back(fmt::format("a bias beside {}", input.bias_of));
  std::vector<std::string> all;
  for (const auto& entry : model_->tensors()) all.push_back(entry.first);
  const std::string near = nearest(names.front(), all);
  fail("{} has no {}{}: give {} {}=TENSOR", options_.weights, fmt::join(names, " or "),
       near.empty() ? "" : fmt::format(" (the nearest name is {})", near), option("map"),
       input.tensor);
}

std::string SavedInputs::source_text(const TensorSpec& spec) const {
  const auto packed = packed_name(spec);
  const auto own = packed ? packed_source(*packed) : std::nullopt;
  const auto source = own ? own : find(spec.name);
  if (!source) return "";
  constexpr const char* parts[] = {"codes", "scales", "zeros"};
  return fmt::format("{} to {}, rows {}, {} {} {}", source->name(),
                     source->parts.back()->saved.name, static_cast<int>(source->rows),
                     own ? parts[static_cast<int>(packed->part)] : "values", dtype_name(spec.dtype),
                     shape_text(spec.shape));
}

void SavedInputs::require_all_used(const Problem& problem) const {
  if (table_ == nullptr || !table_->is_whole) return;
  const auto layers = problem.sizes.find("layers");
  const std::int64_t count = layers == problem.sizes.end() ? 1 : layers->second;
  std::set<std::string, std::less<>> used;
  std::vector<std::string> coded;  // what the names of a quantised weight's tensors begin with
  for (const TensorSpec& spec : op_->tensors(problem)) {
    const auto packed = packed_name(spec);
    const auto own = packed ? packed_source(*packed) : std::nullopt;
    const auto source = own ? own : find(spec.name);
    if (!source || source->recorded) continue;
    for (const auto* part : source->parts) {
      const std::string& name = part->saved.name;
      used.insert(name);
      if (part->quantised)
        coded.push_back(name.ends_with(".weight") ? name.substr(0, name.size() - 6) : name + "_");
    }
  }
  std::sort(coded.begin(), coded.end());
  const auto is_coded = [&](std::string_view name) {
    const auto after = std::upper_bound(coded.begin(), coded.end(), name);
    return after != coded.begin() && name.starts_with(*(after - 1)) && !name.ends_with("bias") &&
           name.find("input_", (after - 1)->size()) == name.npos;
  };
  const bool has_layers = !table_->inputs.front().of_model;
  for (std::int64_t layer = layer_; has_layers && layer < layer_ + count; ++layer) {
    const std::string start = prefix(layer);
    const auto& all = model_->tensors();
    for (auto each = all.lower_bound(start); each != all.end() && each->first.starts_with(start);
         ++each) {
      const std::string& name = each->first;
      const std::string_view rest = std::string_view(name).substr(start.size());
      // Constants that older versions saved too; and GPTQ's older files have a bias of zeros for
      // each product.
      if (used.contains(name) || is_coded(name) || rest == "attn.bias" ||
          rest == "attn.masked_bias" || rest == "self_attn.rotary_emb.inv_freq" ||
          (name.ends_with(".bias") && is_zero(*model_, each->second)))
        continue;
      fail("{}: {} is not of a layer that is known", options_.weights, printable(name));
    }
  }
}

std::string SavedInputs::text() const {
  std::string text;
  if (model_)
    text = prefix_.empty() ? options_.weights
                           : fmt::format("layer {} of {}", layer_, options_.weights);
  if (input_) text += (text.empty() ? "" : ", inputs of ") + options_.input;
  return text;
}

}  // namespace fftune
