// The backward passes of the masked ops: their references against central differences, gradients
// that accumulate, and experts without tokens.
#include <map>
#include <random>

#include "cpu/open.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/masked/masked.hpp"
#include "support/gradients.hpp"
#include "support/op_run.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem linear_problem(const std::string& pass, std::int64_t m, std::int64_t k, std::int64_t n,
                       DType dtype = DType::f32, std::map<std::string, std::string> options = {}) {
  return canonical(
      masked_linear_op(),
      {"masked-linear", pass, dtype, {{"m", m}, {"k", k}, {"n", n}}, std::move(options)},
      DeviceKind::cuda);
}

Problem ffn_problem(const std::string& pass, std::int64_t m, std::int64_t d, std::int64_t h,
                    DType dtype = DType::f32, std::map<std::string, std::string> options = {}) {
  return canonical(masked_ffn_op(),
                   {"masked-ffn", pass, dtype, {{"m", m}, {"d", d}, {"h", h}}, std::move(options)},
                   DeviceKind::cuda);
}

/// The gradients that accumulate, and what they are added to.
std::vector<std::pair<std::string, std::string>> accumulating(
    const std::vector<std::string>& weights) {
  std::vector<std::pair<std::string, std::string>> pairs;
  for (const auto& weight : weights)
    for (const char* expert : {"_true", "_false"})
      pairs.push_back({weight + expert, weight + expert + "_before"});
  return pairs;
}
const auto linear_accumulating = accumulating({"dw"});
const auto ffn_accumulating = accumulating({"dw_gate", "dw_up", "dw_down"});

/// Marks with bytes other than 0 and 1, in an order of no pattern.
std::vector<double> marks_of(std::int64_t m, std::mt19937_64& random) {
  std::vector<double> marks(static_cast<std::size_t>(m));
  for (double& mark : marks) mark = static_cast<double>(random() % 3 * 100);
  return marks;
}

}  // namespace

TEST_CASE("the gradients of masked layers are their central differences") {
  std::mt19937_64 random(1);
  for (const auto& [m, k, n] : {std::tuple{1, 3, 2}, {2, 5, 7}, {7, 4, 3}})
    check_gradients(masked_linear_op(), linear_problem("fwd", m, k, n),
                    linear_problem("bwd", m, k, n),
                    {{"x", "dx"}, {"w_true", "dw_true"}, {"w_false", "dw_false"}}, random,
                    {{"mask", marks_of(m, random)}});
}

TEST_CASE("the gradients of masked networks are their central differences, for every activation") {
  std::mt19937_64 random(3);
  for (const auto& act : activation_names())
    for (const auto& [m, d, h] : {std::tuple{1, 2, 3}, {5, 4, 3}})
      for (const char* save : {"preact", "input"})
        check_gradients(masked_ffn_op(),
                        ffn_problem("fwd", m, d, h, DType::f32, {{"act", act}, {"save", "preact"}}),
                        ffn_problem("bwd", m, d, h, DType::f32, {{"act", act}, {"save", save}}),
                        {{"x", "dx"},
                         {"w_gate_true", "dw_gate_true"},
                         {"w_up_true", "dw_up_true"},
                         {"w_down_true", "dw_down_true"},
                         {"w_gate_false", "dw_gate_false"},
                         {"w_up_false", "dw_up_false"},
                         {"w_down_false", "dw_down_false"}},
                        random, {{"mask", marks_of(m, random)}});
}

/// The reference adds each gradient; with all marks equal, one expert has no tokens.
void check_added(const Op& op, const Problem& plain, const Problem& adding, double mark,
                 const std::vector<std::pair<std::string, std::string>>& pairs, int seed) {
  std::mt19937_64 random(static_cast<std::uint64_t>(seed));
  ReferenceTensors tensors{{"mask", std::vector<double>(5, mark)}};
  draw_inputs(op, adding, random, tensors);
  ReferenceTensors alone = tensors;
  run_stages(op, plain, alone);
  run_stages(op, adding, tensors);
  CHECK(tensors.at("dx") == alone.at("dx"));
  for (const auto& [gradient, before] : pairs) {
    CAPTURE(gradient);
    for (std::size_t i = 0; i < alone.at(gradient).size(); ++i)
      CHECK(tensors.at(gradient)[i] ==
            Approx(alone.at(gradient)[i] + tensors.at(before)[i]).margin(1e-12));
    if (gradient.ends_with(mark == 0 ? "_true" : "_false"))
      CHECK(tensors.at(gradient) == tensors.at(before));
  }
}

TEST_CASE("gradients of masked layers are added to others where that is asked for") {
  check_added(masked_linear_op(), linear_problem("bwd", 5, 3, 4),
              linear_problem("bwd", 5, 3, 4, DType::f32, {{"accumulate", "yes"}}), 0,
              linear_accumulating, 2);
}

TEST_CASE("gradients of masked networks are added to others where that is asked for") {
  check_added(masked_ffn_op(), ffn_problem("bwd", 5, 3, 4),
              ffn_problem("bwd", 5, 3, 4, DType::f32, {{"accumulate", "yes"}}), 1, ffn_accumulating,
              4);
}

/// In place, both ops in every form that accumulates.
void check_all_in_place(Backend& backend, std::int64_t m, DType dtype) {
  check_in_place(backend, masked_linear_op(),
                 linear_problem("bwd", m, 136, 264, dtype, {{"accumulate", "yes"}}),
                 linear_accumulating);
  for (const char* save : {"preact", "input"})
    check_in_place(backend, masked_ffn_op(),
                   ffn_problem("bwd", m, 136, 200, dtype, {{"accumulate", "yes"}, {"save", save}}),
                   ffn_accumulating);
}

/// Both ops in bf16.
void check_backward_baselines(Backend& backend, std::int64_t m) {
  for (const char* frozen : {"no", "yes"}) {
    check_baselines(backend, masked_linear_op(),
                    linear_problem("bwd", m, 40, 72, DType::bf16, {{"frozen", frozen}}), 3e-2);
    for (const char* save : {"preact", "input"})
      check_baselines(
          backend, masked_ffn_op(),
          ffn_problem("bwd", m, 40, 72, DType::bf16, {{"save", save}, {"frozen", frozen}}), 3e-2);
  }
}

TEST_CASE("gradients of masked ops accumulate in place") {
  const auto backend = open_cpu();
  for (const DType dtype : {DType::f32, DType::bf16}) check_all_in_place(*backend, 33, dtype);
}

TEST_CASE("the baselines of the backward passes write the same") {
  const auto backend = open_cpu();
  check_backward_baselines(*backend, 33);
}

TEST_CASE("on a GPU too, gradients of masked ops accumulate in place", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const std::int64_t m : {3, 333}) check_all_in_place(*backend, m, DType::bf16);
}

TEST_CASE("on a GPU too, the baselines of the backward passes write the same", "[gpu]") {
  on_first_cuda([](Backend& backend) { check_backward_baselines(backend, 333); });
}
