// The head of a model against its reference: families one by one, and recipes from x to ids.
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "kernels/head/head.hpp"
#include "registry/catalog.hpp"
#include "runtime/choice.hpp"
#include "support/error_of.hpp"
#include "support/fuzz_cases.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem problem_of(DeviceKind kind, DType dtype, std::int64_t m, std::int64_t d, std::int64_t vocab,
                   Options options) {
  return canonical(
      head_op(), {"head", "fwd", dtype, {{"m", m}, {"d", d}, {"vocab", vocab}}, std::move(options)},
      kind);
}

/// Packed weights for `d` features, now and then.
void draw_weights(Draw& draw, std::int64_t d, Options& options) {
  const int kind = draw.below(10);
  if (kind == 0 && d % 32 == 0) options["weights"] = draw.of({"int4", "mxfp4"});
  if (kind == 1 && d % 16 == 0) options["weights"] = "nvfp4";
  if (kind == 2) options["weights"] = draw.of({"int4", "fp8", "int8"});
  if (options.contains("weights") && !options["weights"].ends_with("fp4"))
    options["group"] = kind == 0 ? "32" : "row";
}

Problem random_problem(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const auto [vocab, features] = draw.matrix(most_elements, 4096);
  std::int64_t d = features;
  if (draw.below(4)) d = (d + 7) / 8 * 8;
  Options options{{"choose", draw.of({"argmax", "sample", "filtered", "none"})},
                  {"norm", draw.of({"rms", "rms", "layer", "none"})},
                  {"logits", draw.of({"f32", "same"})},
                  {"bias", draw.of({"no", "yes"})}};
  if (options["choose"] != "none") {
    options["logprobs"] = draw.of({"no", "yes"});
    options["softcap"] = draw.of({"0", "30", "8"});
  }
  draw_weights(draw, d, options);
  if (options["norm"] == "rms") options["convention"] = draw.of({"llama", "gemma", "t5"});
  Problem problem =
      problem_of(kind, draw.of(head_op().dtypes(kind)), draw.size(5), d, vocab, options);
  if (options["choose"] == "none" || draw.below(3) > 0) return problem;
  problem.sizes["best"] = std::min<std::int64_t>(vocab, 1 + draw.below(20));
  return canonical(head_op(), std::move(problem), kind);
}

void verify_recipes(Backend& backend, std::int64_t most_elements, int count) {
  Draw draw(5);
  for (int i = 0; i < count; ++i) {
    const Problem problem = random_problem(backend.facts().kind, draw, most_elements);
    verify_recipe(backend, head_op(), problem, default_recipe(head_op(), problem, backend.facts()),
                  draw.random()());
  }
}

}  // namespace

TEST_CASE("head's buffers are in the order that the API promises") {
  using Names = std::vector<std::string>;
  const auto names_of = [](const Options& options) {
    Names names;
    for (const auto& tensor :
         head_op().tensors(problem_of(DeviceKind::cuda, DType::bf16, 2, 16, 40, options)))
      if (tensor.role != Role::intermediate) names.push_back(tensor.name);
    return names;
  };
  CHECK(names_of({}) == Names{"x", "w_norm", "w", "ids", "logit"});
  CHECK(names_of({{"norm", "layer"}, {"bias", "yes"}, {"logprobs", "yes"}}) ==
        Names{"x", "w_norm", "b_norm", "w", "bias", "ids", "logit", "logprob"});
  CHECK(
      names_of({{"choose", "filtered"}, {"norm", "none"}}) ==
      Names{"x", "w", "temperature", "seeds", "steps", "top_k", "top_p", "min_p", "ids", "logit"});
  CHECK(names_of({{"weights", "int4"}, {"group", "row"}, {"zeros", "yes"}}) ==
        Names{"x", "w_norm", "w", "w_scale", "w_zero", "ids", "logit"});
  CHECK(names_of({{"choose", "none"}}) == Names{"x", "w_norm", "w", "logits"});
}

TEST_CASE("head: options that do not go together are refused by name") {
  const auto complaint = [](const Options& options) -> std::string {
    return error_of([&] { problem_of(DeviceKind::cuda, DType::bf16, 2, 16, 40, options); });
  };
  CHECK(complaint({{"norm", "layer"}, {"convention", "gemma"}}) ==
        "head: convention=gemma is of norm=rms");
  CHECK(complaint({{"norm", "none"}, {"eps", "1e-5"}}) ==
        "head: eps=1e-05 is of a norm: give norm=rms or norm=layer");
  CHECK(complaint({{"choose", "none"}, {"logprobs", "yes"}}) ==
        "head: logprobs=yes is of a choice: give choose=argmax or choose=sample");
}

TEST_CASE("head: random problems are right on the CPU, from x to ids") {
  const auto backend = open_cpu();
  verify_recipes(*backend, 1 << 14, 200);
}

TEST_CASE("head: untuned, few tokens take the family that writes no logits") {
  const auto facts = facts_of_architecture("sm_90a");
  const auto first_of = [&](std::int64_t m, const Options& options) {
    const Problem problem = problem_of(DeviceKind::cuda, DType::bf16, m, 2048, 128256, options);
    return default_recipe(head_op(), problem, facts).at(1).family;
  };
  CHECK(first_of(1, {}) == "choose_decode");
  CHECK(first_of(16, {{"choose", "sample"}}) == "choose_decode");
  CHECK(first_of(1, {{"choose", "filtered"}}) == "product.product_decode");
  CHECK(first_of(16, {{"weights", "int4"}}) == "product.packed_sm90");
  CHECK(first_of(64, {}) == "product.product_sm90");
  const Problem best = canonical(
      head_op(),
      {"head", "fwd", DType::bf16, {{"m", 1}, {"d", 2048}, {"vocab", 128256}, {"best", 5}}, {}},
      DeviceKind::cuda);
  CHECK(default_recipe(head_op(), best, facts).at(1).family == "product.product_decode");
}

TEST_CASE("head: packed weights are right on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const auto& [m, weights] : {std::pair{1, "int4"}, {20, "mxfp4"}, {3, "nvfp4"}}) {
    const Problem problem = problem_of(DeviceKind::cuda, DType::bf16, m, 256, 1000,
                                       {{"weights", weights}, {"logits", "f32"}});
    verify_recipe(*backend, head_op(), problem,
                  default_recipe(head_op(), problem, backend->facts()), 7);
  }
}

TEST_CASE("head: ids are right on a GPU from x on, with what one kernel writes for the next",
          "[gpu]") {
  on_first_cuda([](Backend& backend) { verify_recipes(backend, 1 << 18, 60); });
}

TEST_CASE("head: the heads of models are right on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  struct Use {
    std::int64_t m;
    const char* choose;
  };
  for (const auto& [d, vocab] : {std::pair{2048, 128256}, {1024, 151936}})
    for (const auto& [m, choose] : {Use{1, "argmax"},
                                    {1, "sample"},
                                    {1, "filtered"},
                                    {16, "sample"},
                                    {64, "argmax"},
                                    {64, "filtered"}}) {
      const Problem problem = problem_of(DeviceKind::cuda, DType::bf16, m, d, vocab,
                                         {{"choose", choose}, {"logprobs", "yes"}});
      verify_recipe(*backend, head_op(), problem,
                    default_recipe(head_op(), problem, backend->facts()), 1);
    }
}

const FuzzCases<head_op, random_problem,
                FuzzCounts{.small = 300, .larger = 20, .gpu = 100, .spaces = 0}>
    head_cases;
