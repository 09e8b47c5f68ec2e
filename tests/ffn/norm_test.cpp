// The norm in front of ffn: its form, its definition, its families on the CPU and on a GPU.
#include "kernels/ffn/norm.hpp"

#include <cmath>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "cpu/open.hpp"
#include "cpu/pool.hpp"
#include "ffn/problems.hpp"
#include "kernels/ffn/ffn.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

const std::vector<Options> norms{
    {{"norm", "rms"}},
    {{"norm", "rms"}, {"convention", "gemma"}, {"eps", "0.25"}},
    {{"norm", "add-rms"}},
    {{"norm", "add-rms"}, {"convention", "t5"}, {"residual", "yes"}, {"bias", "down"}},
    {{"norm", "add-rms"}, {"convention", "gemma"}, {"save", "preact"}}};

/// Every family on the stages that it covers, and recipes of all stages: one for every family of
/// gate_up behind the norm's first.
void verify_norms(Backend& backend, DType dtype, std::int64_t m, std::int64_t d, std::int64_t h,
                  std::mt19937_64& random) {
  const DeviceFacts& facts = backend.facts();
  for (const Options& norm : norms) {
    const Problem problem = ffn_problem(facts.kind, dtype, m, d, h, norm);
    REQUIRE(verify_variants(backend, ffn_op(), problem, random, 1) > 0);
    const Recipe fastest = default_recipe(ffn_op(), problem, facts);
    const Recipe plain = fallback_recipe(ffn_op(), problem, facts);
    for (const Family* family : ffn_op().families()) {
      if (family->device_kind() != facts.kind || family->refusal(problem, facts)) continue;
      if (family->stages().front() != ffn::stage_gate_up) continue;
      Recipe recipe{fastest.front(),
                    {std::string(family->name()), family->default_config(problem, facts)}};
      if (family->stages().size() == 1)
        recipe.push_back(fastest.size() == 3 ? fastest.back() : plain.back());
      verify_recipe(backend, ffn_op(), problem, recipe, random());
    }
    verify_recipe(backend, ffn_op(), problem, plain, random());
  }
}

}  // namespace

TEST_CASE("the norm's tensors follow the others of their role, and its output is gate_up's x") {
  const Problem problem =
      ffn_problem(DeviceKind::cuda, DType::bf16, 5, 16, 24,
                  {{"norm", "add-rms"}, {"bias", "down"}, {"residual", "yes"}, {"save", "preact"}});
  REQUIRE(problem.text() ==
          "ffn/fwd bf16 act=silu bias=down norm=add-rms residual=yes save=preact d=16 h=24 m=5");
  const auto tensors = ffn_op().tensors(problem);
  std::vector<std::string> names;
  for (const auto& tensor : tensors) names.push_back(tensor.name);
  REQUIRE(names == std::vector<std::string>{"x", "w_gate", "w_up", "w_down", "b_down", "residual",
                                            "x_residual", "w_norm", "y", "gate", "up", "sum",
                                            "normalised", "hidden"});
  REQUIRE(tensors[tensor_index(tensors, "sum")].role == Role::output);
  REQUIRE(tensors[tensor_index(tensors, "normalised")].role == Role::intermediate);

  const auto stages = ffn_op().stages(problem);
  REQUIRE(stages.size() == 3);
  REQUIRE(stages[0].name == "norm");
  REQUIRE(stages[0].inputs == std::vector<std::string>{"x", "x_residual", "w_norm"});
  REQUIRE(stages[0].outputs == std::vector<std::string>{"normalised", "sum"});
  REQUIRE(stages[0].bytes == 2.0 * (4 * 5 * 16 + 16));
  REQUIRE(stages[1].inputs.front() == "normalised");
}

TEST_CASE("the norm's options are for a norm, of types that have one") {
  const auto refused = [](DType dtype, std::int64_t d, Options options) {
    try {
      ffn_problem(DeviceKind::cuda, dtype, 4, d, 16, std::move(options));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  REQUIRE(refused(DType::bf16, 16, {{"norm", "none"}, {"eps", "1e-6"}}) == "");
  REQUIRE(refused(DType::bf16, 16, {{"convention", "gemma"}}).find("norm=rms") !=
          std::string::npos);
  REQUIRE(refused(DType::bf16, 16, {{"eps", "0.5"}}).find("norm=rms") != std::string::npos);
  REQUIRE(refused(DType::fp8, 16, {{"norm", "rms"}}).find("fp8") != std::string::npos);
  REQUIRE(refused(DType::bf16, 65537, {{"norm", "rms"}}).find("65536") != std::string::npos);
}

TEST_CASE("the reference of a norm and a layer, by the formula") {
  Pool pool(1);
  Problem problem = ffn_problem(DeviceKind::cpu, DType::f32, 2, 3, 2,
                                {{"norm", "add-rms"}, {"convention", "gemma"}, {"eps", "0.125"}});
  const std::vector<double> x{1, -2, 0.5, 3, 0, -1}, residual{0.5, 1, 1.5, -1, 2, 0.25};
  const std::vector<double> w{0.5, -0.25, 1}, gate{1, 2, 3, -1, 0, 1}, up{2, 0, 1, 1, 1, -1};
  ReferenceTensors tensors{
      {"x", x}, {"x_residual", residual}, {"w_norm", w}, {"w_gate", gate}, {"w_up", up}};
  ffn_op().reference(problem, 0, tensors, pool);
  problem.options["act"] = "none";
  ffn_op().reference(problem, 1, tensors, pool);
  for (std::size_t row = 0; row < 2; ++row) {
    double sum[3], squares = 0, normalised[3];
    for (std::size_t i = 0; i < 3; ++i) {
      sum[i] = x[row * 3 + i] + residual[row * 3 + i];
      squares += sum[i] * sum[i];
      REQUIRE(tensors.at("sum")[row * 3 + i] == sum[i]);
    }
    for (std::size_t i = 0; i < 3; ++i)
      normalised[i] = sum[i] / std::sqrt(squares / 3 + 0.125) * (1 + w[i]);
    for (std::size_t k = 0; k < 2; ++k) {
      double products[2] = {};
      for (std::size_t i = 0; i < 3; ++i) {
        products[0] += normalised[i] * gate[k * 3 + i];
        products[1] += normalised[i] * up[k * 3 + i];
      }
      REQUIRE(tensors.at("hidden")[row * 2 + k] == Approx(products[0] * products[1]));
    }
  }
}

TEST_CASE(
    "gate_up is a programmatic launch behind a norm from compute capability 9.0 on, and only "
    "there") {
  const auto first_launch = [](const Problem& problem, const char* arch, const char* family) {
    const auto facts = facts_of_architecture(arch);
    const Family& of = family_of(ffn_op(), family);
    const Program program = of.program(problem, facts, of.default_config(problem, facts));
    return std::get<KernelLaunch>(program.steps.front());
  };
  const Problem plain = ffn_problem(DeviceKind::cuda, DType::bf16, 8, 64, 128, {});
  const Problem norm = ffn_problem(DeviceKind::cuda, DType::bf16, 8, 64, 128, {{"norm", "rms"}});
  for (const char* family : {"gate_up_sm90", "gate_up_decode", "ffn_decode"}) {
    REQUIRE_FALSE(first_launch(plain, "sm_90a", family).programmatic);
    REQUIRE(first_launch(norm, "sm_90a", family).programmatic);
  }
  REQUIRE_FALSE(first_launch(norm, "sm_80", "gate_up_decode").programmatic);
  REQUIRE(default_recipe(ffn_op(), norm, facts_of_architecture("sm_90a")).front().family ==
          "norm_rows");
}

TEST_CASE("a norm has baselines that normalise too") {
  DeviceFacts cpu;
  cpu.arch = "avx2";
  for (const auto& facts : {cpu, facts_of_architecture("sm_90a")}) {
    const auto dtype = facts.kind == DeviceKind::cpu ? DType::f32 : DType::bf16;
    const Problem norm = ffn_problem(facts.kind, dtype, 16, 64, 128, {{"norm", "add-rms"}});
    const Problem plain = ffn_problem(facts.kind, dtype, 16, 64, 128, {});
    const auto with = ffn_op().baselines(norm, facts), without = ffn_op().baselines(plain, facts);
    REQUIRE(with.size() == without.size());
    for (std::size_t i = 0; i < with.size(); ++i) {
      REQUIRE(with[i].program.steps.size() > without[i].program.steps.size());
      const std::size_t count = ffn_op().tensors(norm).size() + with[i].extra.size();
      for (const auto& step : with[i].program.steps) {
        const auto* launch = std::get_if<KernelLaunch>(&step);
        if (!launch) continue;
        REQUIRE(launch->kernel < with[i].program.kernels.size());
        for (const auto& argument : launch->arguments)
          if (const auto* tensor = std::get_if<TensorArgument>(&argument))
            REQUIRE(tensor->tensor < count);
      }
    }
  }
}

TEST_CASE("norms are right on the CPU, in every family and from stage to stage") {
  const auto backend = open_cpu();
  std::mt19937_64 random(1);
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const auto& [m, d, h] : {std::tuple{1, 1, 1}, {3, 30, 70}, {37, 129, 65}})
      verify_norms(*backend, dtype, m, d, h, random);
}

TEST_CASE("norms are right on the GPU, in every family and from stage to stage", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(1);
  for (const DType dtype : {DType::bf16, DType::fp16, DType::f32})
    for (const auto& [m, d, h] : {std::tuple{1, 37, 5}, {3, 1024, 512}, {200, 264, 136}})
      verify_norms(*backend, dtype, m, d, h, random);
}

TEST_CASE("small norms are right on the GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(2);
  verify_norms(*backend, DType::bf16, 9, 72, 40, random);
  verify_norms(*backend, DType::f32, 5, 37, 19, random);
}
