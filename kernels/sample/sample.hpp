// The next id of each sequence, from the logits of a vocabulary.
//
//   l_i      logits; with softcap=c, c·tanh(logit_i / c)
//   argmax   the id of the largest l_i; of equal ones the first. NaN is above every number, as in
//            PyTorch's argmax
//   sample   id i with the probability softmax(l / temperature)_i: the largest of
//            l_i / temperature - log E_i, where E_i are exponential variates. Their generator is
//            Philox, keyed with the sequence's seed; it counts ids and the sequence's steps. With a
//            temperature that is not above 0, the best id is taken
//   filtered the same of the ids that three filters keep. top_k keeps an id if fewer than k ids are
//            better. top_p keeps it if the better ids that top_k keeps have a probability below p.
//            min_p keeps it if it has at least min_p times the best one's probability. So ids of
//            equal logits stay together. top_k <= 0, top_p >= 1 and min_p <= 0 keep all; a min_p
//            above 1 is 1
//   logit    l of the chosen id; logprob: its log_softmax, without temperature and filter
//   best     with the size best=n the n ids of the largest l, in that order, of equal ones the
//            first, and their log_softmax
//
// The arithmetic of a draw has the same bits on every device (common/sampling.cuh), so the same
// logits, seeds and steps give the same ids everywhere. For the softmax of filters, masses are
// added as integers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in sample/op.cpp; listed in kernels/catalog.cpp.
const Op& sample_op();

namespace sample {

constexpr const char* stage = "choose";
constexpr std::int64_t most_ids = std::int64_t{1} << 19;
constexpr std::int64_t most_best = 64;

struct Form {
  bool draws = false;    // choose=sample or filtered
  bool filters = false;  // choose=filtered
  bool logprobs = false;
  float softcap = 0;      // 0: none
  std::int64_t best = 0;  // ids whose log-probabilities are written
};
Form form_of(const Problem& problem);

/// How many of the best ids are written; a size of head and decode too.
SizeField best_field();
std::string contradiction_of_best(const Problem& problem);

/// How ids are chosen, as head has them too.
std::vector<OptionField> options();

std::vector<const Family*> cuda_families(), cpu_families();

/// Appends to a program the kernel that ends a choice: `partials` has, for each of `rows` rows,
/// `count` parts of a row (common/choice.cuh). Tensors are found in `places` by their names in
/// sample.
void append_finish(Program& program, const Form& form, const TensorPlaces& places,
                   const DeviceFacts& facts, std::size_t partials, std::int64_t rows,
                   std::int64_t count);
/// Bytes of a part.
constexpr std::int64_t partial_bytes = 32;

}  // namespace sample
}  // namespace fftune
