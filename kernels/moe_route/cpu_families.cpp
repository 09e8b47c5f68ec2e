// The router on the CPU: a token a task, in fp32.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/moe_route/moe_route.hpp"

namespace fftune::moe_route {
namespace {

/// One token at a time; its buffers are used again for the next.
class TokenRouter {
 public:
  explicit TokenRouter(const Router& router)
      : router_(router),
        logits_(static_cast<std::size_t>(router.experts)),
        scores_(logits_.size()),
        by_(logits_.size()),
        weights_(static_cast<std::size_t>(router.choices)) {}

  std::span<float> logits() { return logits_; }

  void choose(const float* bias, std::int32_t* ids, float* weights) {
    score();
    const bool by_logits = bias == nullptr && !(router_.groups > 1 && router_.sums_two);
    by_ = by_logits ? logits_ : scores_;
    for (std::size_t i = 0; bias != nullptr && i < by_.size(); ++i) by_[i] += bias[i];
    if (router_.groups > 1) keep_groups();
    taken_.assign(by_.size(), false);
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      const std::size_t best = take(by_, taken_);
      ids[i] = static_cast<std::int32_t>(best);
      weights_[i] = scores_[best];
    }
    weigh();
    for (std::size_t i = 0; i < weights_.size(); ++i) weights[i] = router_.scale * weights_[i];
  }

  /// d_logits in place of the logits.
  void differentiate(const std::int32_t* ids, const float* d_weights) {
    score();
    float sum = static_cast<float>(router_.added()), product = 0;
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      // An expert that is not here has no weight.
      const float none = router_.score == Score::softmax_of_chosen
                             ? -std::numeric_limits<float>::infinity()
                             : 0.0f;
      weights_[i] = is_here(ids[i]) ? scores_[static_cast<std::size_t>(ids[i])] : none;
      sum += weights_[i];
    }
    weigh();
    for (std::size_t i = 0; i < weights_.size(); ++i) product += d_weights[i] * weights_[i];
    std::vector<float>& result = by_;
    std::fill(result.begin(), result.end(), 0.0f);
    float inner = 0;
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      if (!is_here(ids[i])) continue;
      const auto expert = static_cast<std::size_t>(ids[i]);
      float own = router_.scale * d_weights[i];
      if (router_.score == Score::softmax_of_chosen)
        own = router_.scale * weights_[i] * (d_weights[i] - product);
      else if (router_.renormalises)
        own = router_.scale * (d_weights[i] - product) / sum;
      if (router_.score == Score::sigmoid) own *= scores_[expert] * (1 - scores_[expert]);
      if (router_.score == Score::softmax_of_all) {
        own *= scores_[expert];
        inner += own;
      }
      result[expert] += own;
    }
    if (router_.score == Score::softmax_of_all)
      for (std::size_t i = 0; i < result.size(); ++i) result[i] -= scores_[i] * inner;
    logits_ = result;
  }

 private:
  bool is_here(std::int32_t id) const { return id >= 0 && id < router_.experts; }
  /// The first of the best that is not taken, which it is then: any value may be -infinity.
  static std::size_t take(const std::vector<float>& values, std::vector<bool>& taken) {
    std::size_t best = values.size();
    for (std::size_t i = 0; i < values.size(); ++i)
      if (!taken[i] && (best == values.size() || is_better(values[i], values[best]))) best = i;
    taken[best] = true;
    return best;
  }
  static void exponentiate(std::vector<float>& values) {
    const float largest = *std::max_element(values.begin(), values.end());
    float sum = 0;
    for (float& value : values) sum += value = std::exp(value - largest);
    for (float& value : values) value /= sum;
  }
  void score() {
    scores_ = logits_;
    if (router_.score == Score::softmax_of_all) exponentiate(scores_);
    if (router_.score == Score::sigmoid)
      for (float& score : scores_) score = 1 / (1 + std::exp(-score));
  }
  /// From the chosen experts' scores to their weights, without the scale.
  void weigh() {
    if (router_.score == Score::softmax_of_chosen) return exponentiate(weights_);
    if (!router_.renormalises) return;
    float sum = static_cast<float>(router_.added());
    for (const float weight : weights_) sum += weight;
    for (float& weight : weights_) weight /= sum;
  }
  void keep_groups() {
    const auto size = static_cast<std::size_t>(router_.experts / router_.groups);
    std::vector<float> of_groups;
    for (std::size_t first = 0; first < by_.size(); first += size) {
      constexpr float none = -std::numeric_limits<float>::infinity();
      float best = none, second = none;
      for (std::size_t i = first; i < first + size; ++i) {
        const bool leads = is_better(by_[i], best);
        const float other = leads ? best : by_[i];
        if (is_better(other, second)) second = other;
        if (leads) best = by_[i];
      }
      of_groups.push_back(router_.sums_two && size > 1 ? best + second : best);
    }
    std::vector<bool> kept(of_groups.size());
    for (std::int64_t i = 0; i < router_.top_groups; ++i) take(of_groups, kept);
    for (std::size_t i = 0; i < by_.size(); ++i)
      if (!kept[i / size]) by_[i] = -std::numeric_limits<float>::infinity();
  }

  Router router_;
  std::vector<float> logits_, scores_, by_, weights_;
  std::vector<bool> taken_;
};

Program program(const Problem& problem, const DeviceFacts&, const Config&) {
  const Router router = router_of(problem);
  const TensorPlaces places(moe_route_op().tensors(problem));
  const std::size_t logits = places.at("logits"), bias = places.at("bias"), ids = places.at("ids"),
                    weights = places.at("weights"), d_weights = places.at("d_weights"),
                    d_logits = places.at("d_logits");
  return host_program(places.count(), [=, backward = problem.pass == "bwd"](const HostCall& call) {
    const std::size_t row_bytes =
        static_cast<std::size_t>(router.experts) * dtype_bytes(router.dtype);
    for_each_block(router.m, router.experts, call.parallel, [&](const Block& block) {
      TokenRouter token(router);
      for (std::int64_t row = block.first_row; row < block.last_row; ++row) {
        const auto at = static_cast<std::size_t>(row) * row_bytes;
        decode(router.dtype, static_cast<const std::byte*>(call.tensors[logits]) + at,
               token.logits());
        auto* const own_ids = static_cast<std::int32_t*>(call.tensors[ids]) + row * router.choices;
        if (!backward) {
          const auto* const own_bias =
              bias == absent ? nullptr : static_cast<const float*>(call.tensors[bias]);
          token.choose(own_bias, own_ids,
                       static_cast<float*>(call.tensors[weights]) + row * router.choices);
          continue;
        }
        token.differentiate(
            own_ids, static_cast<const float*>(call.tensors[d_weights]) + row * router.choices);
        encode(router.dtype, std::span<const float>(token.logits()),
               static_cast<std::byte*>(call.tensors[d_logits]) + at);
      }
    });
  });
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const auto families =
      of_passes({"cpu_choose", "cpu_choose_gradient"}, {.summary = "a token a task",
                                                        .device_kind = DeviceKind::cpu,
                                                        .stage = moe_route::stage,
                                                        .sources = {"moe_route/cpu_families.cpp"},
                                                        .is_fallback = true,
                                                        .program = program});
  return addresses_of(families);
}

}  // namespace fftune::moe_route
