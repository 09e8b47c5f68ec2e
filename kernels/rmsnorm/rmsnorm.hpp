// Root mean square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467):
// y = x̂ ⊙ factor(w), x̂ = x / sqrt(mean(x²) + eps), the mean over a row of d features.
//
// Conventions: llama rounds x̂ to the dtype before it multiplies, and factor(w) = w; gemma rounds
// nothing on the way, and factor(w) = 1 + w; t5 rounds nothing either, and factor(w) = w.
#pragma once

namespace fftune::norm {

enum class Convention { llama, gemma, t5 };

}  // namespace fftune::norm
