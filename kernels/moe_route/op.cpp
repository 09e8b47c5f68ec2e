// moe-route: its fields, tensors and definition.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/distribution.hpp"
#include "device/parallel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/moe_route/moe_route.hpp"

namespace fftune::moe_route {
namespace {

std::vector<double> scores_of(const Router& router, std::span<const double> logits) {
  std::vector<double> scores(logits.begin(), logits.end());
  if (router.score == Score::sigmoid)
    for (double& score : scores) score = 1 / (1 + std::exp(-score));
  if (router.score != Score::softmax_of_all) return scores;
  const double largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (double& score : scores) sum += score = std::exp(score - largest);
  for (double& score : scores) score /= sum;
  return scores;
}

/// The best `count` of `values`, the best first; of equal ones the first, and any NaN is best.
std::vector<std::size_t> best(std::span<const double> values, std::int64_t count) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return is_better(values[a], values[b]); });
  order.resize(static_cast<std::size_t>(count));
  return order;
}

/// The choice is by the scores. Softmax and sigmoid keep the order of the logits, so where scores
/// are only compared the logits serve; they tell experts apart also where all scores are NaN.
std::vector<std::size_t> chosen_by(const Router& router, std::span<const double> logits,
                                   std::span<const double> scores, std::span<const double> bias) {
  const bool by_logits = bias.empty() && !(router.groups > 1 && router.sums_two);
  const std::span<const double> from = by_logits ? logits : scores;
  std::vector<double> by(from.begin(), from.end());
  for (std::size_t i = 0; i < bias.size(); ++i) by[i] += bias[i];
  if (router.groups > 1) {
    const auto size = static_cast<std::size_t>(router.experts / router.groups);
    std::vector<double> of_groups;
    for (std::size_t first = 0; first < by.size(); first += size) {
      const std::span<const double> own(by.data() + first, size);
      const auto top = best(own, router.sums_two && size > 1 ? 2 : 1);
      double sum = 0;
      for (const std::size_t i : top) sum += own[i];
      of_groups.push_back(sum);
    }
    const auto kept = best(of_groups, router.top_groups);
    for (std::size_t i = 0; i < by.size(); ++i)
      if (std::find(kept.begin(), kept.end(), i / size) == kept.end())
        by[i] = -std::numeric_limits<double>::infinity();
  }
  return best(by, router.choices);
}

/// The weights of chosen experts.
std::vector<double> weights_of(const Router& router, std::span<const double> scores,
                               std::span<const std::size_t> chosen) {
  std::vector<double> weights;
  for (const std::size_t expert : chosen) weights.push_back(scores[expert]);
  if (router.score == Score::softmax_of_chosen && !weights.empty()) {
    const double largest = *std::max_element(weights.begin(), weights.end());
    for (double& weight : weights) weight = std::exp(weight - largest);
  }
  const double sum = std::accumulate(weights.begin(), weights.end(), router.added());
  const bool divides = router.renormalises || router.score == Score::softmax_of_chosen;
  // In this order a single weight that is divided by itself is 1, so that its gradient is 0.
  for (double& weight : weights) weight = weight / (divides ? sum : 1) * router.scale;
  return weights;
}

/// d_logits of one token.
std::vector<double> gradient(const Router& router, std::span<const double> logits,
                             std::span<const std::size_t> chosen,
                             std::span<const double> d_weights) {
  const auto scores = scores_of(router, logits);
  const auto weights = weights_of(router, scores, chosen);
  std::vector<double> d_scores(d_weights.begin(), d_weights.end());
  // Sums of d_weights times the weights without scale, and of the scores.
  double product = 0, sum = router.added();
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    product += d_weights[i] * (weights[i] / router.scale);
    sum += scores[chosen[i]];
  }
  std::vector<double> result(logits.size());
  if (router.score == Score::softmax_of_chosen) {
    for (std::size_t i = 0; i < chosen.size(); ++i)
      result[chosen[i]] = weights[i] * (d_weights[i] - product);
    return result;
  }
  for (double& d_score : d_scores)
    d_score =
        router.renormalises ? router.scale * (d_score - product) / sum : router.scale * d_score;
  if (router.score == Score::sigmoid) {
    for (std::size_t i = 0; i < chosen.size(); ++i)
      result[chosen[i]] = d_scores[i] * scores[chosen[i]] * (1 - scores[chosen[i]]);
    return result;
  }
  double inner = 0;
  for (std::size_t i = 0; i < chosen.size(); ++i) inner += d_scores[i] * scores[chosen[i]];
  for (std::size_t expert = 0; expert < result.size(); ++expert)
    result[expert] = -scores[expert] * inner;
  for (std::size_t i = 0; i < chosen.size(); ++i)
    result[chosen[i]] += d_scores[i] * scores[chosen[i]];
  return result;
}

std::string contradiction(const Problem& problem) {
  const Router router = router_of(problem);
  if (router.choices > router.experts)
    return fmt::format("top-k={} exceeds experts={}", router.choices, router.experts);
  if (problem.has("score", "sigmoid") && problem.has("order", "after"))
    return "order=after is for score=softmax";
  if (problem.has("sum-eps", "1e-06") &&
      (!router.renormalises || router.score == Score::softmax_of_chosen))
    return "sum-eps=1e-06 is of renormalise=yes, and not of order=after";
  if (!problem.sizes.contains("groups"))
    return problem.sizes.contains("top-groups") ? "top-groups without groups: give both" : "";
  if (router.experts % router.groups != 0)
    return fmt::format("groups={} does not divide experts={}", router.groups, router.experts);
  if (router.top_groups > router.groups)
    return fmt::format("top-groups={} exceeds groups={}", router.top_groups, router.groups);
  if (router.choices > router.top_groups * (router.experts / router.groups))
    return fmt::format("top-k={} exceeds the {} experts of {} groups", router.choices,
                       router.top_groups * (router.experts / router.groups), router.top_groups);
  return "";
}

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  const Router router = router_of(problem);
  const std::vector<std::int64_t> of_experts{router.m, router.experts},
      of_choices{router.m, router.choices};
  if (problem.pass == "fwd") {
    std::vector<TensorSpec> tensors{{"logits", problem.dtype, of_experts, Role::input, 1}};
    if (router.bias) tensors.push_back({"bias", DType::f32, {router.experts}, Role::input, 0.1});
    tensors.push_back({"ids", DType::i32, of_choices, Role::output});
    tensors.push_back({"weights", DType::f32, of_choices, Role::output, 1});
    return tensors;
  }
  TensorSpec logits{"logits", problem.dtype, of_experts, Role::input, 1};
  TensorSpec ids{"ids", DType::i32, of_choices, Role::input};
  ids.draw = [router](std::uint64_t seed, std::span<double> values) {
    const auto drawn = draw_routing({}, router.m, router.experts, router.choices, seed);
    std::copy_n(drawn.begin(), values.size(), values.begin());
  };
  logits.kept = ids.kept = true;
  return {{"d_weights", DType::f32, of_choices, Role::input, 1},
          logits,
          ids,
          {"d_logits", problem.dtype, of_experts, Role::output, 1}};
}

void complete_stage(const Problem& problem, StageSpec& stage) {
  stage.name = moe_route::stage;
  const Router router = router_of(problem);
  stage.flops = static_cast<double>(router.m * router.experts);
  stage.reduction_length = router.experts;
}

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const Router router = router_of(problem);
  const auto experts = static_cast<std::size_t>(router.experts),
             choices = static_cast<std::size_t>(router.choices);
  const auto row_of = [](const std::vector<double>& matrix, std::size_t row, std::size_t width) {
    return std::span<const double>(matrix).subspan(row * width, width);
  };
  const auto& logits = tensors.at("logits");
  const std::size_t rows = logits.size() / experts;
  if (problem.pass == "bwd") {
    std::vector<double> d_logits(logits.size());
    for_each_row(rows, experts, parallel, [&](std::size_t row) {
      std::vector<std::size_t> chosen;
      for (const double id : row_of(tensors.at("ids"), row, choices))
        chosen.push_back(static_cast<std::size_t>(id));
      const auto own = gradient(router, row_of(logits, row, experts), chosen,
                                row_of(tensors.at("d_weights"), row, choices));
      std::copy(own.begin(), own.end(),
                d_logits.begin() + static_cast<std::ptrdiff_t>(row * experts));
    });
    tensors["d_logits"] = std::move(d_logits);
    return;
  }
  const std::span<const double> bias =
      router.bias ? std::span<const double>(tensors.at("bias")) : std::span<const double>();
  std::vector<double> ids(rows * choices), weights(rows * choices);
  for_each_row(rows, experts, parallel, [&](std::size_t row) {
    const auto own_logits = row_of(logits, row, experts);
    const auto scores = scores_of(router, own_logits);
    const auto chosen = chosen_by(router, own_logits, scores, bias);
    const auto own = weights_of(router, scores, chosen);
    for (std::size_t i = 0; i < choices; ++i) {
      ids[row * choices + i] = static_cast<double>(chosen[i]);
      weights[row * choices + i] = own[i];
    }
  });
  tensors["ids"] = std::move(ids);
  tensors["weights"] = std::move(weights);
}

OpFacts facts() {
  return {
      .name = "moe-route",
      .summary =
          "router of a mixture of experts: ids and weights of the top-k of softmax or sigmoid of "
          "the logits",
      .sizes = {row_tokens(), top_k_size(), experts_size(),
                rare_size("groups",
                          "groups of experts: a token uses the best ones; none if left out", 32, 8),
                rare_size("top-groups", "groups that a token uses; all if left out", 32, 4,
                          same_as("groups"))},
      .options =
          {{"score", "function of a logit that gives an expert's score", {"softmax", "sigmoid"}},
           rare_option("order",
                       "whether the softmax is over all experts, before the choice, or over the "
                       "chosen ones after it",
                       {"before", "after"}),
           rare_option("group-score",
                       "score of a group: its best expert, or the sum of its best two",
                       {"max", "top2"}, "fwd"),
           rare_option("bias", "whether a bias is added to the scores for the choice alone",
                       {"no", "yes"}, "fwd"),
           {.name = "renormalise",
            .help = "whether the weights of a token add up to scale",
            .choices = {"no", "yes"}},
           rare_option(
               "sum-eps",
               "what renormalise=yes adds to the sum of a token's scores; usual: 1e-20 with "
               "score=sigmoid, and nothing with softmax",
               {"usual", "1e-06"}),
           rare_number("scale", "a factor of the weights", "1", {1e-6, 1e6})},
      .families = {cuda_families, cpu_families},
      .contradiction = contradiction,
      .stage = {.tensors = tensors_of, .complete = complete_stage, .reference = reference}};
}

}  // namespace

SizeField experts_size() {
  return {.name = "experts", .help = "experts to choose from", .max = most_experts, .example = 128};
}

SizeField top_k_size() {
  return {
      .name = "top-k", .help = "experts that a token chooses", .max = most_choices, .example = 8};
}

Router router_of(const Problem& problem) {
  const auto optional = [&](const char* name, std::int64_t otherwise) {
    return problem.sizes.contains(name) ? problem.size(name) : otherwise;
  };
  Router router;
  router.m = problem.size("m");
  router.experts = problem.size("experts");
  router.choices = problem.size("top-k");
  router.groups = optional("groups", 1);
  router.top_groups = optional("top-groups", router.groups);
  router.score = problem.has("score", "sigmoid") ? Score::sigmoid
                 : problem.has("order", "after") ? Score::softmax_of_chosen
                                                 : Score::softmax_of_all;
  router.sums_two = problem.has("group-score", "top2");
  router.bias = problem.has("bias", "yes");
  router.renormalises = problem.has("renormalise", "yes");
  router.adds_millionth = problem.has("sum-eps", "1e-06");
  if (problem.options.contains("scale")) router.scale = static_cast<float>(problem.number("scale"));
  router.dtype = problem.dtype;
  return router;
}

}  // namespace fftune::moe_route

const fftune::Op& fftune::moe_route_op() {
  static const DescribedOp op(moe_route::facts());
  return op;
}
