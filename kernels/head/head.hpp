// The head of a language model: final norm, logits of the vocabulary, and the next ids.
//
//   logits = norm(x)·wᵀ (+ bias), w [vocab, d]: rounded to x's type, or f32 with logits=f32
//   ids    = sample(logits): sample/sample.hpp; with choose=none the logits are the result
//
// It is made of other ops: rmsnorm or layernorm, linear and sample. Where ids are chosen without a
// filter, one family has the product and the choice together (choose_decode.cu): for up to 16
// tokens no logit reaches memory. With a filter the logits are in the workspace: what top-k and
// top-p keep depends on all of them.
#pragma once

#include <vector>

#include "core/problem.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in head/op.cpp; listed in kernels/catalog.cpp.
const Op& head_op();

namespace head {

std::vector<OpPart> parts_of(const Problem& problem);

/// The family that has the product and the choice in one stream of the weights.
const Family& choose_decode();

}  // namespace head
}  // namespace fftune
