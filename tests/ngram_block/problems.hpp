// Problems of ngram-block for tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

#include "kernels/ngram_block/ngram_block.hpp"
#include "support/fuzz.hpp"

namespace fftune::test {

/// A problem with every field drawn; vocabularies are often small, so that ids repeat.
inline Problem random_ngram_block(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const std::int64_t vocab = std::min({draw.size(18), most_elements, ngram_block::most_tokens});
  const std::int64_t len = std::min({draw.size(12), most_elements, ngram_block::most_ids});
  const std::int64_t b =
      std::min(draw.size(6), std::max<std::int64_t>(1, most_elements / std::max(vocab, len)));
  Problem problem{"ngram-block",
                  "fwd",
                  draw.of(ngram_block_op().dtypes(kind)),
                  {{"b", b}, {"len", len}, {"vocab", vocab}},
                  {{"ids", draw.of({"i32", "i64"})},
                   {"lengths", draw.of({"whole", "own"})},
                   {"ngrams", draw.of({"one", "own"})},
                   {"n", draw.of({"1", "2", "3", "5", "40"})},
                   {"padding", draw.of({"-1", "0", "3"})}}};
  // Own ids are often fewer than an n-gram has, so that most of it is in the prefix.
  if (draw.below(2)) {
    problem.sizes["prefix"] = std::min({draw.size(12), most_elements, ngram_block::most_ids});
    if (draw.below(2)) problem.sizes["len"] = std::min<std::int64_t>(len, draw.size(3));
    if (draw.below(4)) problem.sizes["beams"] = draw.size(5);
  }
  return canonical(ngram_block_op(), problem, kind);
}

}  // namespace fftune::test
