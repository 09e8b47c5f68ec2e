// Fields of problems that several ops have, each with one meaning.
#pragma once

#include <string>
#include <vector>

#include "registry/op.hpp"

namespace fftune {

/// The element types of inputs and outputs that every op has; the first is the default.
std::vector<DType> float_dtypes(DeviceKind kind);

/// The tokens of an op of products: from one, where reading the weights is all, to what fills any
/// GPU.
SizeField product_tokens();
/// The tokens of an op that memory bounds.
SizeField row_tokens();

/// Whether y is added to a residual, in one pass with it.
OptionField residual_option();
/// `of` says what has the gradients that are added to others: "the weights".
OptionField accumulate_option(const std::string& of);
/// What a gated feed-forward network keeps for its backward pass; `order` says in which order the
/// rows of it are, where that is not the tokens': ", in the order of the mask".
std::vector<OptionField> gated_save_options(const std::string& order = "");

}  // namespace fftune
