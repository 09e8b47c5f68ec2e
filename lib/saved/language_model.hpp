// The parts of a saved language model around its layers: by which names it has them, and what the
// first layer takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/dtype.hpp"
#include "saved/model.hpp"

namespace fftune {

/// One of layer_prefixes(): that of the model's layers, if there is a layer of this number; else
/// empty.
std::string_view layer_prefix(const SavedModel& model, std::int64_t layer);
/// Layers by a prefix that is known.
std::int64_t count_layers(const SavedModel& model);
/// "model." of "model.layers.#.".
std::string model_prefix(std::string_view layer_prefix);
/// A tensor of the model by its name behind the prefix of the layers without their own part, or
/// behind a shorter part of it: lm_head is beside the model. Null if there is none.
const SavedModel::Tensor* find_in_model(const SavedModel& model, std::string_view layer_prefix,
                                        std::string_view name);

/// The embedding [vocabulary, features]; null if there is none by a name that is known.
const SavedModel::Tensor* find_embedding(const SavedModel& model);

/// The rows [ids, features] that the first layer takes for tokens from `position` on: rows of the
/// embedding, times Gemma's factor, plus learned positions. `out` has as many bytes. Throws
/// Error(invalid_input) for an id or a position that the model does not have.
void embed(const SavedModel& model, std::span<const std::int32_t> ids, std::int64_t position,
           DType dtype, std::span<std::byte> out);

/// The number, rounded to the type.
double rounded(double value, DType dtype);

}  // namespace fftune
