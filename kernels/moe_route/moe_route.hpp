// The router of a mixture of experts: from a token's logits the experts that it chooses, and their
// weights.
//
//   score_e    softmax over all experts, or sigmoid, of the logits; or the logits themselves, and a
//              softmax over the chosen ones alone (order=after)
//   ids        the top-k by score_e (+ bias_e), the best first; of equal ones the first. NaN is
//              above every number, as in PyTorch's topk.
//   groups     the experts are in `groups` groups of neighbours; only those of the best
//   `top-groups`
//              groups take part. A group is as good as its best expert, or as the sum of its best
//              two
//   weights    the chosen experts' scores without the bias, divided by their sum where
//              renormalise=yes, times `scale`. To the sum of sigmoids 1e-20 is added, as
//              transformers' DeepSeek-V3 does: it is 0 where all of them underflow
//
// The bias balances the load (DeepSeek-V3, arXiv 2412.19437, 2.1.2) and has no gradient. The
// backward pass takes the ids as they are: d_logits of d_weights.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "core/problem.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in moe_route/op.cpp; listed in kernels/catalog.cpp.
const Op& moe_route_op();

namespace moe_route {

constexpr const char* stage = "choose";

constexpr std::int64_t most_experts = 1024, most_choices = 32;
/// The experts of a mixture, and those that a token chooses.
SizeField experts_size();
SizeField top_k_size();

/// In the order of device code's `router_score` (route.cu).
enum class Score { softmax_of_all, softmax_of_chosen, sigmoid };

struct Router {
  std::int64_t m = 0;  // tokens
  std::int64_t experts = 0;
  std::int64_t choices = 0;  // of a token: top-k
  std::int64_t groups = 1, top_groups = 1;
  Score score = Score::softmax_of_all;
  bool sums_two = false;  // a group's score is that of its best two experts
  bool bias = false, renormalises = false;
  bool adds_millionth = false;  // sum-eps=1e-06
  float scale = 1;
  /// Added to the sum that weights are divided by.
  double added() const { return adds_millionth ? 1e-6 : score == Score::sigmoid ? 1e-20 : 0; }
  DType dtype = DType::f32;  // of the logits
};
Router router_of(const Problem& problem);

/// Whether an expert of this value is chosen before one of the other: NaN is above every number.
template <typename Value>
bool is_better(Value value, Value than) {
  return value > than || (std::isnan(value) && !std::isnan(than));
}

std::vector<const Family*> cuda_families(), cpu_families();

}  // namespace moe_route
}  // namespace fftune
