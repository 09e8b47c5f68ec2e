#include "saved/language_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "core/fail.hpp"
#include "saved/inputs.hpp"
#include "saved/layer_config.hpp"
#include "saved/names.hpp"

namespace fftune {
namespace {

std::string with_number(std::string_view prefix, std::int64_t layer) {
  std::string text(prefix);
  text.replace(text.find('#'), 1, fmt::format("{}", layer));
  return text;
}

bool has_layer(const SavedModel& model, std::string_view prefix, std::int64_t layer) {
  const std::string start = with_number(prefix, layer);
  const auto entry = model.tensors().lower_bound(start);
  return entry != model.tensors().end() && entry->first.starts_with(start);
}

/// A row of a table of `features`; `what` it is of.
void read_row(const SavedModel& model, const SavedModel::Tensor& table, std::int64_t row,
              const char* what, std::span<double> values) {
  const auto& shape = table.saved.shape;
  if (shape.size() != 2 || shape[1] != std::ssize(values))
    fail("{}: '{}' is {}, not a table of {} features", model.path().string(), table.saved.name,
         shape_text(shape), values.size());
  if (row < 0 || row >= shape[0])
    fail("{}: there is no {} {}: '{}' has {}", model.path().string(), what, row, table.saved.name,
         shape[0]);
  std::vector<float> own(values.size());
  model.read(table, static_cast<std::size_t>(row) * own.size(), DType::f32,
             reinterpret_cast<std::byte*>(own.data()), own.size());
  for (std::size_t i = 0; i < own.size(); ++i) values[i] += double{own[i]};
}

}  // namespace

std::string_view layer_prefix(const SavedModel& model, std::int64_t layer) {
  for (const std::string_view prefix : layer_prefixes())
    if (has_layer(model, prefix, layer)) return prefix;
  return {};
}

std::int64_t count_layers(const SavedModel& model) {
  for (const std::string_view prefix : layer_prefixes()) {
    std::int64_t count = 0;
    while (count < most_layers && has_layer(model, prefix, count)) ++count;
    if (count > 0) return count;
  }
  return 0;
}

std::string model_prefix(std::string_view layer_prefix) {
  // "layers.#." and "h.#." are the layers' own part.
  const std::size_t end = layer_prefix.find(".#.");
  if (end == layer_prefix.npos) return "";
  const std::size_t dot = layer_prefix.rfind('.', end - 1);
  return std::string(layer_prefix.substr(0, dot == layer_prefix.npos ? 0 : dot + 1));
}

const SavedModel::Tensor* find_in_model(const SavedModel& model, std::string_view layer_prefix,
                                        std::string_view name) {
  for (std::string start = model_prefix(layer_prefix);;) {
    if (const auto* tensor = model.find(start + std::string(name))) return tensor;
    if (start.empty()) return nullptr;
    start.pop_back();
    start.resize(start.rfind('.') == start.npos ? 0 : start.rfind('.') + 1);
  }
}

const SavedModel::Tensor* find_embedding(const SavedModel& model) {
  const std::string_view prefix = layer_prefix(model, 0);
  for (const std::string_view name : embedding_names())
    if (const auto* tensor = find_in_model(model, prefix, name)) return tensor;
  return nullptr;
}

double rounded(double value, DType dtype) {
  std::byte bytes[sizeof value] = {};
  encode(dtype, std::span<const double>(&value, 1), bytes);
  decode(dtype, bytes, std::span<double>(&value, 1));
  return value;
}

void embed(const SavedModel& model, std::span<const std::int32_t> ids, std::int64_t position,
           DType dtype, std::span<std::byte> out) {
  const auto* const table = find_embedding(model);
  if (table == nullptr || table->saved.shape.size() != 2)
    fail("{} has no embedding by a name that is known", model.path().string());
  const auto* const positions = find_in_model(model, layer_prefix(model, 0), positions_name);
  double factor = 1;
  if (model.config() != nullptr)
    if (const auto text = LayerConfig(*model.config(), 0).value({"", {config_embedding}}))
      factor = rounded(std::strtod(text->c_str(), nullptr), dtype);
  const auto features = static_cast<std::size_t>(table->saved.shape[1]);
  const std::size_t row_bytes = features * dtype_bytes(dtype);
  if (out.size() != ids.size() * row_bytes)
    fail("{} tokens have {} bytes of {}, not {}", ids.size(), ids.size() * row_bytes,
         dtype_name(dtype), out.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    std::vector<double> row(features);
    read_row(model, *table, ids[i], "id", row);
    for (double& value : row) value *= factor;
    if (positions != nullptr)
      read_row(model, *positions, position + static_cast<std::int64_t>(i), "position", row);
    encode(dtype, std::span<const double>(row), out.data() + i * row_bytes);
  }
}

}  // namespace fftune
