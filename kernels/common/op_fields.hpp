// Problem fields that several ops share.
#pragma once

#include <string>
#include <vector>

#include "registry/op.hpp"

namespace fftune {

/// The element types of inputs and outputs that every op has; the first is the default.
std::vector<DType> float_dtypes(DeviceKind kind);

/// The tokens of a GEMM op: from one, which is bound by reading the weights, to enough to fill any
/// GPU.
SizeField product_tokens();
/// The tokens of a memory-bound op.
SizeField row_tokens();

/// Whether y is added to a residual in the same pass.
OptionField residual_option();
/// Whether gradients are accumulated; `of` says whose: "the weights".
OptionField accumulate_option(const std::string& of);
/// What a gated feed-forward network saves for its backward pass. `order` names the order of the
/// saved rows if it is not that of the tokens: ", in the order of the mask".
std::vector<OptionField> gated_save_options(const std::string& order = "");

}  // namespace fftune
