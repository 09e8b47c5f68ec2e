// The loss of a language model's head without its logits in memory:
//
//   logits = x·wᵀ (+ bias)          x [m, d], w [vocab, d], rounded to x's type
//   loss, lse, logprob, entropy     those of cross-entropy of the logits and labels
//   dx = dlogits·w, dw = dlogitsᵀ·x, dbias = the sum of dlogits' rows
//
// Rows are computed a chunk at a time: their logits lie in at most `workspace` MiB of scratch
// memory, where the gradient takes their place, and the GEMMs of the chunk follow. The sums of dw
// over the chunks are added in dw itself, which rounds once a chunk; those of dbias are in f32.
//
// The forward pass with gradients=yes computes them along with the loss, for a loss whose gradient
// is 1. The backward pass computes the logits again from lse and takes any gradient of the loss.
// For a slice of the vocabulary (slice-of) lse is that of all slices, and dx is the slice's part of
// a sum.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cross_entropy/cross_entropy.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in op.cpp; listed in kernels/catalog.cpp.
const Op& linear_cross_entropy_op();

namespace linear_cross_entropy {

constexpr const char* stage_product = "product";      // logits
constexpr const char* stage_loss = "loss";            // loss and its like, and dlogits
constexpr const char* stage_gradients = "gradients";  // dx, dw, dbias

struct Form {
  cross_entropy::Form loss;
  bool backward = false;     // the pass
  bool gradients = false;    // dx and the others are results
  bool frozen = false;       // w and bias have no gradients
  bool accumulates = false;  // these are added to others
  bool bias = false;

  bool d_w() const { return gradients && !frozen; }
};
Form form_of(const Problem& problem);

/// Rows of a chunk: as many as the workspace holds, 8 at least, and about equally many in each.
std::int64_t chunk_rows(const Problem& problem);

std::vector<const Family*> families();

}  // namespace linear_cross_entropy
}  // namespace fftune
