// all-argmax: of each row, the best of the ids that the ranks of a group chose, each from its slice
// of the vocabulary.
//
//   best_logit = max over ranks of logit    best_ids = rank * vocab + ids, of that rank
//
// ids, logit, best_ids, best_logit [m]; `vocab` is the number of ids of a slice. NaN is above every
// number; of equal logits the lowest rank's id is the best. `group` and link are those of
// all-reduce (all_reduce/all_reduce.hpp), as are packets and greetings.
#pragma once

#include <vector>

#include "kernels/all_reduce/all_reduce.hpp"

namespace fftune {

/// Defined in op.cpp; listed in kernels/catalog.cpp.
const Op& all_argmax_op();

namespace all_argmax {

/// A message of one logit and one id a row, 16 bytes as packets.
all_reduce::Form form_of(const Problem& problem);

std::vector<const Family*> cuda_families(), cpu_families();

}  // namespace all_argmax
}  // namespace fftune
