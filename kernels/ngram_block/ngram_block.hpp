// No n-gram twice (Paulus et al. 2017, arXiv 1705.04304, section 2.5). In each row of token ids,
// the last n - 1 tokens are searched for further up, and the logit of every token that followed
// them there becomes -inf, in place. With n = 1 that is every token of the row.
//
// The first `length` ids of a row of `len` count. An id that equals `padding` never matches, and is
// not blocked. Any other id that is no token, below 0 or from `vocab` on, is compared like any id,
// counted in `invalid`, and never written through. A row whose n is below 1 blocks nothing; lengths
// are clamped to the existing ids.
//
// Rows may share prefixes: `beams` rows after each other are a group (the last may be smaller), and
// the text of each begins with the group's prefix, which is stored once, and goes on with its own
// ids. Definitions are of the whole text, so n-grams span the border, and an id of a prefix that is
// no token is counted in each row of the group.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in ngram_block.cpp; listed in kernels/catalog.cpp.
const Op& ngram_block_op();

namespace ngram_block {

constexpr const char* stage = "block";
constexpr std::int64_t most_ids = 131072;     // of a row or prefix
constexpr std::int64_t most_tokens = 524288;  // of a vocabulary
constexpr std::int64_t most_beams = 65536;    // of a group

/// A problem's sizes and options, read once.
struct Rows {
  std::int64_t b = 0;       // rows
  std::int64_t len = 0;     // ids of a row; where there is a prefix, those after it
  std::int64_t prefix = 0;  // ids of a prefix; 0: there is none
  std::int64_t beams = 1;   // rows that share one
  std::int64_t vocab = 0;   // logits of a row
  std::int64_t n = 0;       // of every row, unless each has its own
  std::int64_t padding = 0;
  bool own_lengths = false;
  bool own_n = false;
  DType ids = DType::i32;
  DType dtype = DType::f32;  // of the logits

  std::int64_t groups() const { return (b + beams - 1) / beams; }
};
Rows rows_of(const Problem& problem);

std::vector<const Family*> cuda_families(), cpu_families();

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace ngram_block
}  // namespace fftune
