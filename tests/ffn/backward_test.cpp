// The backward pass of ffn: its references against central differences, its families against its
// references.
#include <random>

#include "core/error.hpp"
#include "cpu/open.hpp"
#include "ffn/problems.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/ffn/ffn.hpp"
#include "support/gradients.hpp"
#include "support/op_run.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem backward_problem(std::int64_t m, std::int64_t d, std::int64_t h, DType dtype,
                         Options options, DeviceKind kind = DeviceKind::cuda) {
  return ffn_problem(kind, dtype, m, d, h, std::move(options), "bwd");
}

std::vector<std::string> buffers_of(const Problem& problem) {
  std::vector<std::string> names;
  for (const auto& tensor : ffn_op().tensors(problem))
    if (tensor.role != Role::intermediate) names.push_back(tensor.name);
  return names;
}

const std::vector<Options> backward_forms{{},
                                          {{"save", "input"}},
                                          {{"accumulate", "yes"}},
                                          {{"save", "input"}, {"accumulate", "yes"}},
                                          {{"frozen", "yes"}},
                                          {{"save", "input"}, {"frozen", "yes"}}};

/// The gradients that accumulate, and what they are added to.
const std::vector<std::pair<std::string, std::string>> accumulating{
    {"dw_gate", "dw_gate_before"}, {"dw_up", "dw_up_before"}, {"dw_down", "dw_down_before"}};

}  // namespace

TEST_CASE("the backward pass has its buffers in the order that the API promises") {
  using Names = std::vector<std::string>;
  CHECK(buffers_of(backward_problem(5, 16, 24, DType::bf16, {})) ==
        Names{"dy", "x", "gate", "up", "w_gate", "w_up", "w_down", "dx", "dw_gate", "dw_up",
              "dw_down"});
  CHECK(buffers_of(backward_problem(5, 16, 24, DType::bf16, {{"save", "input"}})) ==
        Names{"dy", "x", "w_gate", "w_up", "w_down", "dx", "dw_gate", "dw_up", "dw_down"});
  CHECK(buffers_of(backward_problem(5, 16, 24, DType::bf16, {{"accumulate", "yes"}})) ==
        Names{"dy", "x", "gate", "up", "w_gate", "w_up", "w_down", "dw_gate_before", "dw_up_before",
              "dw_down_before", "dx", "dw_gate", "dw_up", "dw_down"});
  CHECK(buffers_of(backward_problem(5, 16, 24, DType::bf16, {{"frozen", "yes"}})) ==
        Names{"dy", "gate", "up", "w_gate", "w_up", "w_down", "dx"});
  CHECK(buffers_of(
            backward_problem(5, 16, 24, DType::bf16, {{"frozen", "yes"}, {"save", "input"}})) ==
        Names{"dy", "x", "w_gate", "w_up", "w_down", "dx"});
}

TEST_CASE("frozen weights leave out the products of their gradients, and refuse to accumulate") {
  for (const char* save : {"preact", "input"}) {
    const auto stages = ffn_op().stages(backward_problem(5, 16, 24, DType::bf16, {{"save", save}}));
    const auto frozen = ffn_op().stages(
        backward_problem(5, 16, 24, DType::bf16, {{"save", save}, {"frozen", "yes"}}));
    REQUIRE(frozen.size() + 2 == stages.size());
    for (std::size_t i = 0; i < frozen.size(); ++i) CHECK(frozen[i].name == stages[i].name);
  }
  CHECK_THROWS_WITH(
      backward_problem(5, 16, 24, DType::bf16, {{"frozen", "yes"}, {"accumulate", "yes"}}),
      ContainsSubstring("accumulate=yes with frozen=yes: nothing is added to"));
}

TEST_CASE(
    "the backward pass's intermediates follow its buffers, and its text leaves out defaults") {
  const auto intermediates = [](const std::map<std::string, std::string>& form) {
    std::vector<std::string> names;
    for (const auto& tensor : ffn_op().tensors(backward_problem(5, 16, 24, DType::bf16, form)))
      if (tensor.role == Role::intermediate) names.push_back(tensor.name);
    return names;
  };
  for (const char* accumulate : {"no", "yes"}) {
    CHECK(intermediates({{"accumulate", accumulate}}) ==
          std::vector<std::string>{"hidden", "d_gate", "d_up"});
    CHECK(intermediates({{"accumulate", accumulate}, {"save", "input"}}) ==
          std::vector<std::string>{"gate", "up", "hidden", "d_gate", "d_up"});
  }
  CHECK(backward_problem(5, 16, 24, DType::bf16, {{"save", "preact"}}).text() ==
        "ffn/bwd bf16 act=silu d=16 h=24 m=5");
}

TEST_CASE("the backward pass takes neither fp8 nor the options of the forward pass") {
  CHECK_THROWS_AS(backward_problem(5, 16, 32, DType::fp8, {}), Error);
  CHECK_THROWS_AS(backward_problem(5, 16, 24, DType::bf16, {{"save", "none"}}), Error);
  CHECK_THROWS_AS(backward_problem(5, 16, 24, DType::bf16, {{"residual", "yes"}}), Error);
}

TEST_CASE("computing gate and up again costs two products more and keeps 2 m h elements less") {
  const auto kept = backward_problem(5, 16, 24, DType::bf16, {}),
             again = backward_problem(5, 16, 24, DType::bf16, {{"save", "input"}});
  CHECK(cost_of(ffn_op(), kept).flops == 12.0 * 5 * 16 * 24);
  CHECK(cost_of(ffn_op(), again).flops == 16.0 * 5 * 16 * 24);
  CHECK(cost_of(ffn_op(), kept).bytes - cost_of(ffn_op(), again).bytes == 2 * 2.0 * 5 * 24);
  CHECK(kept_bytes(ffn_op().tensors(kept)) == 2 * (5 * 16 + 2 * 5 * 24));
  CHECK(kept_bytes(ffn_op().tensors(again)) == 2 * 5 * 16);
}

TEST_CASE("the gradients of ffn are its central differences, for every activation") {
  std::mt19937_64 random(1);
  for (const auto& act : activation_names())
    for (const auto& [m, d, h] : {std::tuple{1, 2, 3}, {3, 4, 5}})
      for (const char* save : {"preact", "input"}) {
        const Problem forward{"ffn",
                              "fwd",
                              DType::f32,
                              {{"m", m}, {"d", d}, {"h", h}},
                              {{"act", act}, {"save", "preact"}}};
        Problem backward = forward;
        backward.pass = "bwd";
        backward.options["save"] = save;
        check_gradients(
            ffn_op(), forward, backward,
            {{"x", "dx"}, {"w_gate", "dw_gate"}, {"w_up", "dw_up"}, {"w_down", "dw_down"}}, random);
      }
}

TEST_CASE("gradients are added to others where that is asked for") {
  std::mt19937_64 random(2);
  const auto plain = backward_problem(3, 4, 5, DType::f32, {});
  const auto adding = backward_problem(3, 4, 5, DType::f32, {{"accumulate", "yes"}});
  ReferenceTensors tensors;
  draw_inputs(ffn_op(), adding, random, tensors);
  ReferenceTensors alone = tensors;
  run_stages(ffn_op(), plain, alone);
  run_stages(ffn_op(), adding, tensors);
  for (const std::string name : {"dw_gate", "dw_up", "dw_down"})
    for (std::size_t i = 0; i < alone.at(name).size(); ++i)
      CHECK(tensors.at(name)[i] ==
            Approx(alone.at(name)[i] + tensors.at(name + "_before")[i]).margin(1e-12));
  CHECK(tensors.at("dx") == alone.at("dx"));
}

TEST_CASE("the backward pass is right on the CPU in every form, dtype and activation") {
  const auto backend = open_cpu();
  std::mt19937_64 random(3);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto& form : backward_forms)
      for (const auto& [m, d, h] : {std::tuple{1, 1, 1}, {2, 5, 3}, {65, 40, 133}})
        verify_families(*backend, ffn_op(),
                        {backward_problem(m, d, h, dtype, form, DeviceKind::cpu)}, random, 1);
    for (const auto& act : activation_names())
      verify_families(*backend, ffn_op(),
                      {backward_problem(34, 24, 50, dtype, {{"act", act}}, DeviceKind::cpu)},
                      random, 0);
  }
}

TEST_CASE("the backward pass is right on a GPU at sizes that no tile divides", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(4);
  for (const auto& [m, d, h] :
       {std::tuple{1, 8, 8}, {2, 72, 40}, {50, 200, 136}, {77, 136, 264}, {1001, 200, 520}})
    verify_families(*backend, ffn_op(), {backward_problem(m, d, h, DType::bf16, {})}, random, 1);
}

TEST_CASE("the gradients of a gate are right on a GPU where a block has several tiles", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const Problem problem = backward_problem(6001, 40, 1032, DType::bf16, {});
  const Family& family = family_of(ffn_op(), "d_hidden_sm90");
  if (family.refusal(problem, backend->facts())) FFTUNE_SKIP("the device has no wgmma");
  const auto feasible = family.space(problem, backend->facts()).feasible();
  std::mt19937_64 random(7);
  Verifier verifier(*backend, ffn_op(), problem, random());
  for (const char* schedule : {"cooperative", "pingpong"}) {
    // The source is prefetched a tile ahead where there are stages, which both MMA warpgroups of
    // pingpong share.
    std::vector<Config> configs;
    for (const Config& config : feasible)
      if (config.word("schedule") == schedule && config.at("bn") == 128 &&
          config.at("epilogue_stages") * (config.word("schedule") == "pingpong" ? 2 : 1) >= 2)
        configs.push_back(config);
    REQUIRE(!configs.empty());
    for (int i = 0; i < 3; ++i) {
      const Config& config = configs.at(random() % configs.size());
      verify_variant(verifier, {&family, config, 0, 1},
                     backend->compile(family.program(problem, backend->facts(), config)));
    }
  }
}

TEST_CASE("the backward pass is right on a GPU in every form", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(5);
  for (const auto& form : backward_forms) {
    verify_families(*backend, ffn_op(), {backward_problem(64, 104, 200, DType::bf16, form)}, random,
                    0);
    verify_families(*backend, ffn_op(), {backward_problem(333, 136, 264, DType::bf16, form)},
                    random, 1);
  }
}

TEST_CASE("the backward pass is right on a GPU for every activation, in fp16 and f32", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(6);
  for (const auto& act : activation_names())
    verify_families(*backend, ffn_op(),
                    {backward_problem(130, 136, 72, DType::fp16, {{"act", act}})}, random, 0);
  for (const auto& [m, d, h] : {std::tuple{1, 1, 1}, {3, 7, 5}, {70, 37, 129}})
    verify_families(*backend, ffn_op(), {backward_problem(m, d, h, DType::f32, {})}, random, 0);
}

TEST_CASE("the backward pass's baseline writes the same, and gradients accumulate in place") {
  const auto backend = open_cpu();
  for (const char* save : {"preact", "input"}) {
    for (const char* frozen : {"no", "yes"})
      check_baselines(*backend, ffn_op(),
                      backward_problem(33, 40, 72, DType::f32, {{"save", save}, {"frozen", frozen}},
                                       DeviceKind::cpu),
                      1e-5);
    check_baselines(*backend, ffn_op(),
                    backward_problem(33, 40, 72, DType::bf16, {{"save", save}}, DeviceKind::cpu),
                    2e-2);
    check_in_place(*backend, ffn_op(),
                   backward_problem(33, 40, 72, DType::bf16,
                                    {{"save", save}, {"accumulate", "yes"}}, DeviceKind::cpu),
                   accumulating);
  }
}

TEST_CASE("on a GPU too, the baseline writes the same, and gradients accumulate in place",
          "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const char* save : {"preact", "input"}) {
    check_baselines(*backend, ffn_op(),
                    backward_problem(333, 136, 264, DType::bf16, {{"save", save}}), 2e-2);
    for (const std::int64_t m : {40, 333})
      check_in_place(
          *backend, ffn_op(),
          backward_problem(m, 136, 264, DType::bf16, {{"save", save}, {"accumulate", "yes"}}),
          accumulating);
  }
}
