// ffn with packed weights: every family against the float64 reference.
#include <cstddef>
#include <random>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "cpu/open.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/packed/params.cuh"
#include "support/error_of.hpp"
#include "support/op_reference.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem packed_problem(std::int64_t m, std::int64_t d, std::int64_t h, DType dtype,
                       Options options) {
  options.emplace("weights", "int4");
  return {"ffn", "fwd", dtype, {{"m", m}, {"d", d}, {"h", h}}, std::move(options)};
}

/// Each size with every `stride`-th format, so that they take turns.
void verify_formats_on_gpu(DType dtype, std::size_t stride) {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(3);
  std::vector<Options> formats{{{"weights", "mxfp4"}},
                               {{"weights", "fp8"}, {"group", "128"}},
                               {{"weights", "int8"}, {"group", "row"}}};
  for (const char* group : {"128", "32", "row"})
    for (const char* zeros : {"no", "yes"}) formats.push_back({{"group", group}, {"zeros", zeros}});
  std::vector<Problem> problems;
  std::size_t turn = 0;
  for (const auto& [m, d, h] :
       {std::tuple{1, 256, 640}, {16, 128, 384}, {50, 384, 256}, {130, 256, 384}})
    for (const Options& format : formats)
      if (turn++ % stride == 0) problems.push_back(packed_problem(m, d, h, dtype, format));
  verify_families(*backend, ffn_op(), problems, random, 1, reads_packed_weights);
}

std::vector<std::string> families_of(std::int64_t m, const Options& options, const char* arch) {
  const DeviceFacts facts = facts_of_architecture(arch);
  const Problem problem =
      canonical(ffn_op(), packed_problem(m, 4096, 14336, DType::bf16, options), DeviceKind::cuda);
  std::vector<std::string> families;
  for (const Variant& variant : default_recipe(ffn_op(), problem, facts))
    families.push_back(variant.family);
  return families;
}

std::string complaint(Problem problem) {
  return error_of([&] { canonical(ffn_op(), std::move(problem), DeviceKind::cuda); });
}

}  // namespace

TEST_CASE("ffn with packed weights has their tensors, and a stage before each product") {
  const auto problem = canonical(
      ffn_op(), packed_problem(5, 64, 128, DType::bf16, {{"group", "64"}, {"zeros", "yes"}}),
      DeviceKind::cuda);
  CHECK(tensor_names(problem) ==
        std::vector<std::string>{"x", "w_gate", "w_up", "w_down", "w_gate_scale", "w_gate_zero",
                                 "w_up_scale", "w_up_zero", "w_down_scale", "w_down_zero", "y",
                                 "w_gate_dense", "w_up_dense", "w_down_dense", "hidden"});
  std::vector<std::string> stages;
  for (const auto& stage : ffn_op().stages(problem)) stages.push_back(stage.name);
  CHECK(stages == std::vector<std::string>{"expand_gate_up", "gate_up", "expand_down", "down"});
}

TEST_CASE("kernels of ffn read packed weights, and those without expand them first") {
  const std::vector<std::string> wgmma{"gate_up_packed_sm90", "down_packed_sm90"};
  // As an H100 timed one token of int4: 38.2 us, and 40.7 where gate and up are mma.sync's.
  CHECK(families_of(1, {}, "sm_90a").front() == "gate_up_packed_sm90");
  CHECK(families_of(64, {}, "sm_90a") == wgmma);
  CHECK(families_of(65, {}, "sm_90a") == wgmma);
  CHECK(families_of(64, {}, "sm_80") == std::vector<std::string>{"gate_up_packed", "down_packed"});
  CHECK(families_of(65, {}, "sm_80") ==
        std::vector<std::string>{"expand_gate_up", "gate_up_sm80", "expand_down", "down_sm80"});
  CHECK(families_of(1, {{"norm", "rms"}}, "sm_90a").size() == 3);
  CHECK(families_of(64, {{"gate", "no"}}, "sm_90a") ==
        std::vector<std::string>{"expand_gate_up", "up_sm90", "down_packed_sm90"});
}

TEST_CASE("packed weights are loaded before the wait only behind a launch of the same plan") {
  const auto launch_of = [](const Options& options, const char* arch, const char* family) {
    const DeviceFacts facts = facts_of_architecture(arch);
    const Problem problem = canonical(
        ffn_op(), packed_problem(16, 4096, 14336, DType::bf16, options), DeviceKind::cuda);
    const Family& of = family_of(ffn_op(), family);
    const Program program = of.program(problem, facts, of.default_config(problem, facts));
    return std::get<KernelLaunch>(program.steps.front());
  };
  const auto value_of = [](const KernelLaunch& launch, std::size_t offset) {
    for (const auto& field : launch.parameters->fields)
      if (field.offset == offset) return std::get<std::int32_t>(field.value);
    return -1;
  };
  const auto loads_early = [&](const KernelLaunch& launch) {
    return value_of(launch, offsetof(packed_params, loads_early)) == 1;
  };
  // Another plan's launch may write the weights of the first launch of a plan.
  CHECK_FALSE(launch_of({}, "sm_90a", "gate_up_packed_sm90").programmatic);
  CHECK_FALSE(loads_early(launch_of({}, "sm_90a", "gate_up_packed_sm90")));
  CHECK(loads_early(launch_of({{"norm", "rms"}}, "sm_90a", "gate_up_packed_sm90")));
  CHECK(loads_early(launch_of({}, "sm_90a", "down_packed_sm90")));
  CHECK_FALSE(launch_of({}, "sm_90a", "gate_up_packed").programmatic);
  for (const char* family : {"gate_up_packed_sm90", "gate_up_packed"})
    CHECK(launch_of({{"norm", "rms"}}, "sm_90a", family).programmatic);
  for (const char* family : {"gate_up_packed", "down_packed"})
    CHECK_FALSE(launch_of({}, "sm_80", family).programmatic);
}

TEST_CASE("packed weights of ffn that cannot be are refused in one line") {
  CHECK(complaint(packed_problem(1, 128, 192, DType::bf16, {})) ==
        "ffn: groups of 128 do not divide h=192: give group=row or another size");
  CHECK(complaint(packed_problem(1, 128, 128, DType::bf16, {{"gate", "no"}})) == "");
  CHECK(complaint(packed_problem(1, 128, 128, DType::fp8, {})) ==
        "ffn: weights=int4 is for x of bf16, fp16 and f32, not fp8");
}

TEST_CASE("ffn with packed weights is right on the CPU") {
  const auto backend = open_cpu();
  std::mt19937_64 random(1);
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const auto& [m, d, h] : {std::tuple{1, 32, 64}, {40, 96, 160}})
      for (const char* zeros : {"no", "yes"}) {
        verify_families(*backend, ffn_op(),
                        {packed_problem(m, d, h, dtype, {{"group", "32"}, {"zeros", zeros}})},
                        random, 1);
        verify_families(*backend, ffn_op(),
                        {packed_problem(m, d + 3, h + 1, dtype,
                                        {{"group", "row"}, {"zeros", zeros}, {"bias", "down"}})},
                        random, 1);
      }
  for (const std::string weights : {"mxfp4", "nvfp4", "fp8", "int8"}) {
    Options options{{"weights", weights}};
    if (!weights.ends_with("fp4")) options["group"] = "32";
    verify_families(*backend, ffn_op(), {packed_problem(5, 64, 96, DType::f32, options)}, random,
                    1);
  }
  for (const char* weights : {"int4", "nvfp4"})
    verify_families(
        *backend, ffn_op(),
        {packed_problem(5, 128, 128, DType::f32,
                        {{"weights", weights}, {"gate", "no"}, {"bias", "both"}, {"act", "gelu"}})},
        random, 1);
  verify_families(*backend, ffn_op(),
                  {packed_problem(7, 64, 64, DType::f32,
                                  {{"group", "32"}, {"save", "preact"}, {"norm", "rms"}})},
                  random, 1);
}

TEST_CASE("ffn with packed weights is right on a GPU in every format in bf16", "[gpu]") {
  verify_formats_on_gpu(DType::bf16, 2);
}

TEST_CASE("ffn with packed weights is right on a GPU in every format in fp16", "[gpu]") {
  verify_formats_on_gpu(DType::fp16, 4);
}

TEST_CASE("ffn with packed weights and no gate is right on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(4);
  std::vector<Problem> problems;
  for (const auto& [m, weights] : {std::pair{1, "int4"}, {40, "nvfp4"}, {150, "int4"}})
    problems.push_back(
        packed_problem(m, 256, 384, DType::bf16,
                       {{"weights", weights}, {"gate", "no"}, {"bias", "both"}, {"act", "gelu"}}));
  verify_families(*backend, ffn_op(), problems, random, 1, reads_packed_weights);
}

TEST_CASE("ffn with packed weights is right on a GPU with a norm, and at the sizes of a model",
          "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(3);
  std::vector<Problem> problems;
  for (const std::int64_t m : {3, 64, 200})
    problems.push_back(packed_problem(m, 256, 256, DType::bf16,
                                      {{"save", "preact"}, {"residual", "yes"}, {"norm", "rms"}}));
  for (const std::int64_t m : {2, 48, 150})
    problems.push_back(packed_problem(m, 416, 288, DType::bf16, {{"weights", "mxfp4"}}));
  for (const std::int64_t m : {1, 48, 150})
    problems.push_back(packed_problem(m, 400, 272, DType::bf16, {{"weights", "nvfp4"}}));
  for (const std::int64_t m : {1, 64})
    problems.push_back(packed_problem(m, 4096, 14336, DType::bf16, {}));
  verify_families(*backend, ffn_op(), problems, random, 1, reads_packed_weights);
}
