#include <cmath>

#include "core/error.hpp"
#include "kernels/ffn/ffn.hpp"
#include "registry/catalog.hpp"
#include "support/op_reference.hpp"

using namespace fftune;

namespace {

Problem plain_problem(std::int64_t m, std::int64_t d, std::int64_t h) {
  return canonical(ffn_op(), {"ffn", "", DType::bf16, {{"m", m}, {"d", d}, {"h", h}}, {}},
                   DeviceKind::cuda);
}

std::vector<std::string> names_of(const std::vector<TensorSpec>& tensors) {
  std::vector<std::string> names;
  for (const auto& tensor : tensors) names.push_back(tensor.name);
  return names;
}

TensorSpec named(const std::vector<TensorSpec>& tensors, const char* name) {
  return tensors.at(tensor_index(tensors, name));
}

}  // namespace

TEST_CASE("ffn is in the catalog, and every source that its families name is embedded") {
  test::check_registration(ffn_op());
}

TEST_CASE("defaults: pass fwd, silu; dtypes and tokens by device") {
  const auto problem = plain_problem(1, 8, 8);
  REQUIRE(problem.pass == "fwd");
  REQUIRE(problem.option("act") == "silu");
  REQUIRE(ffn_op().dtypes(DeviceKind::cuda) ==
          std::vector{DType::bf16, DType::fp16, DType::f32, DType::fp8});
  REQUIRE(ffn_op().dtypes(DeviceKind::cpu) == std::vector{DType::f32, DType::bf16, DType::fp8});
  const auto sizes = ffn_op().sizes();
  REQUIRE(sizes[0].name == ffn_op().token_size());
  REQUIRE(sizes[0].default_on_cuda == std::vector<std::int64_t>{1, 16, 64, 256, 1024, 4096, 16384});
  REQUIRE(sizes[0].default_on_cpu == std::vector<std::int64_t>{1, 16, 128, 512});
  for (const auto& wrong : {"swish", "SILU", ""})
    REQUIRE_THROWS_AS(
        canonical(ffn_op(),
                  {"ffn", "", DType::bf16, {{"m", 1}, {"d", 8}, {"h", 8}}, {{"act", wrong}}},
                  DeviceKind::cuda),
        Error);
}

TEST_CASE("tensors are laid out as torch.nn.Linear's, in the order that the API promises") {
  using Shape = std::vector<std::int64_t>;
  const auto tensors = ffn_op().tensors(plain_problem(5, 16, 24));
  REQUIRE(names_of(tensors) ==
          std::vector<std::string>{"x", "w_gate", "w_up", "w_down", "y", "hidden"});
  REQUIRE(named(tensors, "x").shape == Shape{5, 16});
  REQUIRE(named(tensors, "w_gate").shape == Shape{24, 16});
  REQUIRE(named(tensors, "w_up").shape == Shape{24, 16});
  REQUIRE(named(tensors, "w_down").shape == Shape{16, 24});
  REQUIRE(named(tensors, "y").shape == Shape{5, 16});
  REQUIRE(named(tensors, "hidden").shape == Shape{5, 24});
  REQUIRE(named(tensors, "w_gate").scale == 0.25);
  REQUIRE(named(tensors, "w_down").scale == Approx(1 / std::sqrt(24.0)));
  for (const auto& tensor : tensors) REQUIRE(tensor.dtype == DType::bf16);
}

TEST_CASE("the training form adds gate and up to the outputs, and its bytes") {
  using Shape = std::vector<std::int64_t>;
  Problem problem = plain_problem(5, 16, 24);
  REQUIRE_FALSE(problem.options.contains("save"));  // presets that know nothing of it still match
  problem.options["save"] = "none";
  REQUIRE(canonical(ffn_op(), problem, DeviceKind::cuda) == plain_problem(5, 16, 24));
  problem.options["save"] = "preact";
  problem = canonical(ffn_op(), problem, DeviceKind::cuda);
  REQUIRE(problem.text() == "ffn/fwd bf16 act=silu save=preact d=16 h=24 m=5");

  const auto tensors = ffn_op().tensors(problem);
  REQUIRE(names_of(tensors) ==
          std::vector<std::string>{"x", "w_gate", "w_up", "w_down", "y", "gate", "up", "hidden"});
  for (const char* name : {"gate", "up"}) {
    REQUIRE(named(tensors, name).shape == Shape{5, 24});
    REQUIRE(named(tensors, name).role == Role::output);
  }
  const double more = 2 * 2.0 * 5 * 24;
  const auto stages = ffn_op().stages(problem), plain = ffn_op().stages(plain_problem(5, 16, 24));
  REQUIRE(stages[0].bytes == plain[0].bytes + more);
  REQUIRE(stages[1].bytes == plain[1].bytes);
  REQUIRE(cost_of(ffn_op(), problem).bytes ==
          cost_of(ffn_op(), plain_problem(5, 16, 24)).bytes + more);
}

TEST_CASE("stages chain, and their work is counted") {
  const auto problem = plain_problem(4096, 1024, 2048);
  const auto stages = ffn_op().stages(problem);
  REQUIRE(stages.size() == 2);
  REQUIRE(stages[0].name == "gate_up");
  REQUIRE(stages[1].name == "down");
  REQUIRE(stages[0].outputs.front() == stages[1].inputs.front());
  const double mdh = 4096.0 * 1024 * 2048;
  REQUIRE(stages[0].flops == 4 * mdh);
  REQUIRE(stages[1].flops == 2 * mdh);
  REQUIRE(stages[0].reduction_length == 1024);
  REQUIRE(stages[1].reduction_length == 2048);
  REQUIRE(stages[0].bytes == 2.0 * (4096 * 1024 + 2 * 2048 * 1024 + 4096 * 2048));
  REQUIRE(stages[1].bytes == 2.0 * (4096 * 2048 + 2048 * 1024 + 4096 * 1024));
  const auto cost = cost_of(ffn_op(), problem);
  REQUIRE(cost.flops == 6 * mdh);
  REQUIRE(cost.bytes == 2.0 * (2.0 * 4096 * 1024 + 3.0 * 2048 * 1024));
}

TEST_CASE("sizes whose bytes pass 2^31 are counted right") {
  const auto problem = plain_problem(100000, 40000, 50000);
  const auto tensors = ffn_op().tensors(problem);
  REQUIRE(named(tensors, "x").bytes() == 8'000'000'000u);
  REQUIRE(named(tensors, "hidden").bytes() == 10'000'000'000u);
  REQUIRE(cost_of(ffn_op(), problem).flops == 1.2e15);
  const auto largest = plain_problem(2147483647, 2147483647, 2147483647);
  REQUIRE(named(ffn_op().tensors(largest), "w_gate").bytes() ==
          2ull * 2147483647ull * 2147483647ull);
}

TEST_CASE("a bias and a residual follow the inputs, and are read by the second stage") {
  using Shape = std::vector<std::int64_t>;
  Problem problem = plain_problem(5, 16, 24);
  problem.options["bias"] = "down";
  problem.options["residual"] = "yes";
  problem = canonical(ffn_op(), problem, DeviceKind::cuda);
  const auto tensors = ffn_op().tensors(problem);
  REQUIRE(names_of(tensors) == std::vector<std::string>{"x", "w_gate", "w_up", "w_down", "b_down",
                                                        "residual", "y", "hidden"});
  REQUIRE(named(tensors, "b_down").shape == Shape{16});
  REQUIRE(named(tensors, "residual").shape == Shape{5, 16});
  REQUIRE(named(tensors, "y").role == Role::output);
  const auto stages = ffn_op().stages(problem), plain = ffn_op().stages(plain_problem(5, 16, 24));
  REQUIRE(stages[1].bytes == plain[1].bytes + 2.0 * (16 + 5 * 16));
}

TEST_CASE("in fp8 every quantised tensor has a scale after the weights, and y is bf16") {
  Problem problem = plain_problem(5, 16, 32);
  problem.dtype = DType::fp8;
  problem.options["save"] = "preact";
  const auto tensors = ffn_op().tensors(problem);
  REQUIRE(names_of(tensors) == std::vector<std::string>{"x", "w_gate", "w_up", "w_down", "x_scale",
                                                        "w_gate_scale", "w_up_scale",
                                                        "hidden_scale", "w_down_scale", "y", "gate",
                                                        "up", "hidden"});
  for (const char* name :
       {"x_scale", "w_gate_scale", "w_up_scale", "hidden_scale", "w_down_scale"}) {
    REQUIRE(named(tensors, name).dtype == DType::f32);
    REQUIRE(named(tensors, name).elements() == 1);
    REQUIRE(named(tensors, name).mean > 0);
  }
  for (const char* name : {"x", "w_gate", "w_down", "hidden"})
    REQUIRE(named(tensors, name).dtype == DType::fp8);
  for (const char* name : {"y", "gate", "up"}) REQUIRE(named(tensors, name).dtype == DType::bf16);
  REQUIRE(ffn_op().stages(problem)[1].bytes == 5.0 * 32 + 16 * 32 + 2 * 4 + 2 * 5 * 16);
}

TEST_CASE("with scales of blocks an operand has one for each 128 elements, and hidden's are made") {
  Problem problem = plain_problem(5, 144, 272);
  problem.dtype = DType::fp8;
  problem.options["scales"] = "block";
  using Shape = std::vector<std::int64_t>;
  const auto tensors = ffn_op().tensors(problem);
  REQUIRE(names_of(tensors) ==
          std::vector<std::string>{"x", "w_gate", "w_up", "w_down", "x_scale", "w_gate_scale",
                                   "w_up_scale", "w_down_scale", "y", "hidden", "hidden_scale"});
  for (const auto& [name, shape] : {std::pair<const char*, Shape>{"x_scale", {5, 2}},
                                    {"w_gate_scale", {3, 2}},
                                    {"w_up_scale", {3, 2}},
                                    {"w_down_scale", {2, 3}},
                                    {"hidden_scale", {5, 3}}}) {
    CAPTURE(name);
    REQUIRE(named(tensors, name).shape == shape);
  }
  REQUIRE(named(tensors, "hidden_scale").role == Role::intermediate);
  const auto stages = ffn_op().stages(problem);
  REQUIRE(stages[0].outputs == std::vector<std::string>{"hidden", "hidden_scale"});
  REQUIRE(stages[1].inputs ==
          std::vector<std::string>{"hidden", "w_down", "hidden_scale", "w_down_scale"});
  problem.dtype = DType::bf16;
  REQUIRE_THROWS_WITH(canonical(ffn_op(), problem, DeviceKind::cuda),
                      "ffn: scales=block is for dtype fp8, not bf16");
}

TEST_CASE("wgmma keeps the 128 features of a scale together") {
  Problem problem = plain_problem(256, 1024, 2048);
  problem.dtype = DType::fp8;
  problem.options["scales"] = "block";
  const auto hopper = facts_of_architecture("sm_90a");
  for (const std::int64_t m : {1, 64, 256, 4096}) {
    problem.sizes["m"] = m;
    const auto recipe = default_recipe(ffn_op(), problem, hopper);
    REQUIRE(recipe[0].family == "gate_up_sm90");
    REQUIRE(recipe[1].family == "down_sm90");
    for (const auto& config :
         family_of(ffn_op(), "gate_up_sm90").space(problem, hopper).feasible()) {
      CAPTURE(config.text());
      const bool swap_ab = config.word("schedule") == "swap_ab";
      if (swap_ab) {
        // One warpgroup, or two that compute the scale together.
        REQUIRE(config.get("bn") % 128 == 0);
        REQUIRE(config.get("bn") / config.get("mma_warpgroups") % 64 == 0);
      }
      if (!swap_ab) REQUIRE(config.get("bn") == 128);
    }
  }
}

TEST_CASE("fp8 is for wgmma and the fallbacks, and the others say why") {
  Problem problem = plain_problem(8, 64, 128);
  problem.dtype = DType::fp8;
  const auto hopper = facts_of_architecture("sm_90a"), ampere = facts_of_architecture("sm_80");
  const auto recipe = default_recipe(ffn_op(), problem, hopper);
  REQUIRE(recipe.size() == 2);
  REQUIRE(recipe[0].family == "gate_up_sm90");
  REQUIRE(recipe[1].family == "down_sm90");
  REQUIRE(default_recipe(ffn_op(), problem, ampere)[0].family == "gate_up_fallback");
  for (const auto* name : {"gate_up_decode", "down_decode", "gate_up_sm80", "down_sm80"})
    REQUIRE(family_of(ffn_op(), name).refusal(problem, ampere)->find("fp8") != std::string::npos);
  problem.options["save"] = "preact";
  REQUIRE(default_recipe(ffn_op(), problem, hopper)[0].family == "gate_up_sm90");
  problem.options.erase("save");
  problem.sizes["d"] = 72;  // 16-byte rows in bf16, not in fp8
  REQUIRE(family_of(ffn_op(), "gate_up_sm90").refusal(problem, hopper));
}

TEST_CASE("untuned, more than 8 tokens take wgmma but for few of many features") {
  const auto families = [](const char* arch, std::int64_t m, std::int64_t d, std::int64_t h) {
    std::vector<std::string> names;
    for (const Variant& variant :
         default_recipe(ffn_op(), plain_problem(m, d, h), facts_of_architecture(arch)))
      names.push_back(variant.family);
    return names;
  };
  using Names = std::vector<std::string>;
  const Names decode{"gate_up_decode", "down_decode"}, wgmma{"gate_up_sm90", "down_sm90"};
  CHECK(families("sm_90a", 8, 2048, 8192) == decode);
  CHECK(families("sm_90a", 9, 2048, 8192) == wgmma);
  CHECK(families("sm_90a", 16, 1024, 2048) == Names{"gate_up_decode", "down_sm90"});
  CHECK(families("sm_90a", 16, 4096, 14336) == wgmma);
  CHECK(families("sm_80", 16, 2048, 8192) == decode);
}

TEST_CASE("every form is served on every device, by families that are not fallbacks too") {
  for (const auto& arch : {"sm_80", "sm_89", "sm_90a"}) {
    Problem problem = plain_problem(256, 64, 128);
    problem.options["save"] = "preact";
    problem.options["bias"] = "down";
    problem.options["residual"] = "yes";
    const auto facts = facts_of_architecture(arch);
    for (const auto& variant : default_recipe(ffn_op(), problem, facts))
      REQUIRE_FALSE(family_of(ffn_op(), variant.family).is_fallback());
    REQUIRE(fallback_recipe(ffn_op(), problem, facts).size() == 2);
  }
}

TEST_CASE("baselines name tensors that exist") {
  DeviceFacts cpu;
  cpu.arch = "avx2";
  for (const auto& facts : {cpu, facts_of_architecture("sm_90a")}) {
    auto problem = plain_problem(16, 64, 128);
    if (facts.kind == DeviceKind::cpu) problem.dtype = DType::f32;
    const auto baselines = ffn_op().baselines(problem, facts);
    std::vector<std::pair<Baseline, std::size_t>> all;
    const std::size_t plain = ffn_op().tensors(problem).size();
    REQUIRE(baselines.size() == (facts.kind == DeviceKind::cpu ? 1 : 2));
    REQUIRE(baselines[0].name == "unfused");
    problem.options["save"] = "preact";
    for (const auto& baseline : ffn_op().baselines(problem, facts))
      all.emplace_back(baseline, ffn_op().tensors(problem).size());
    for (const auto& baseline : baselines) all.emplace_back(baseline, plain);
    for (const auto& [baseline, own] : all) {
      REQUIRE(!baseline.summary.empty());
      const std::size_t count = own + baseline.extra.size();
      for (const auto& step : baseline.program.steps)
        if (const auto* gemm = std::get_if<LibraryGemm>(&step))
          for (const auto& pointer : {gemm->a, gemm->b, gemm->c})
            REQUIRE(std::get<TensorArgument>(pointer).tensor < count);
    }
  }
}
