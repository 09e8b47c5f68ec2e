// ffn in fp8 on a GPU: every form with either kind of scales, and the same bits every time.
#include <random>
#include <string>
#include <vector>

#include "ffn/problems.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/ffn/ffn.hpp"
#include "support/op_run.hpp"
#include "support/tensor_maps.hpp"
#include "support/verify_variants.hpp"
#include "verify/host_threads.hpp"
#include "verify/truth.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem fp8_problem(std::int64_t m, std::int64_t d, std::int64_t h, Options options,
                    const std::string& scales) {
  options["scales"] = scales;
  return ffn_problem(DeviceKind::cuda, DType::fp8, m, d, h, std::move(options));
}

}  // namespace

TEST_CASE("the Hopper families take every form in fp8") {
  const auto facts = facts_of_architecture("sm_90a");
  for (const std::string scales : {"tensor", "block"})
    for (const Options& form : forward_forms)
      for (const Family* family :
           {&family_of(ffn_op(), "gate_up_sm90"), &family_of(ffn_op(), "down_sm90")}) {
        const Problem problem = fp8_problem(33, 272, 400, form, scales);
        CAPTURE(problem.text(), family->name());
        CHECK(family->refusal(problem, facts).value_or("") == "");
      }
}

TEST_CASE("the Hopper families save and add bf16 in fp8") {
  const auto facts = facts_of_architecture("sm_90a");
  const Problem problem = fp8_problem(33, 272, 400, forward_forms.back(), "tensor");
  const TensorPlaces places(ffn_op().tensors(problem));
  const auto maps_of = [&](const char* name) {
    const Family& family = family_of(ffn_op(), name);
    const auto program = family.program(problem, facts, family.default_config(problem, facts));
    return tensor_maps_of(std::get<KernelLaunch>(program.steps.back()));
  };
  // The launch's map of a tensor.
  const auto map_of = [&](const std::vector<TensorMapArgument>& maps, const char* name) {
    for (const TensorMapArgument& map : maps)
      if (std::get<TensorArgument>(map.matrix).tensor == places.at(name)) return map;
    FAIL("no map of " << name);
    return TensorMapArgument{};
  };
  const auto gate_up = maps_of("gate_up_sm90");
  REQUIRE(gate_up.size() == 6);  // x, w_gate, w_up, hidden, gate, up
  CHECK(map_of(gate_up, "hidden").dtype == DType::fp8);
  CHECK(map_of(gate_up, "gate").dtype == DType::bf16);
  CHECK(map_of(gate_up, "up").dtype == DType::bf16);
  const auto down = maps_of("down_sm90");
  REQUIRE(down.size() == 4);  // hidden, w_down, y, residual
  CHECK(map_of(down, "y").dtype == DType::bf16);
  CHECK(map_of(down, "residual").dtype == DType::bf16);
}

TEST_CASE("tensors saved in fp8 are held to the tolerance of bf16, unlike hidden") {
  HostThreads threads;
  const Problem problem = fp8_problem(300, 272, 400, {{"save", "preact"}}, "tensor");
  Truth truth(ffn_op(), problem, 1, threads);
  const TensorPlaces places(ffn_op().tensors(problem));
  CHECK(truth.expected(0, places.at("gate")).tolerance < 3.5e-3);
  CHECK(truth.expected(0, places.at("up")).tolerance < 3.5e-3);
  CHECK(truth.expected(0, places.at("hidden")).tolerance > 1e-2);
  CHECK(truth.expected(0, places.at("y")).tolerance > 1e-2);  // hidden is on its way
}

TEST_CASE("fp8 is right on a GPU in every form, with either kind of scales", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(11);
  for (const std::string scales : {"tensor", "block"})
    for (const Options& form : forward_forms)
      verify_families(*backend, ffn_op(), {fp8_problem(300, 272, 400, form, scales)}, random, 0);
}

TEST_CASE("a thousand runs in fp8 give the same bits", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const std::string scales : {"tensor", "block"})
    for (const std::int64_t m : {1, 64, 1000}) {
      const Problem problem = fp8_problem(m, 1024, 2048, {}, scales);
      const Recipe recipe = default_recipe(ffn_op(), problem, backend->facts());
      CAPTURE(problem.text(), recipe_text(recipe));
      OpRun run(*backend, ffn_op(), problem);
      const auto executables = run.compile(ffn_op(), problem, recipe);
      run.run(executables);
      const auto first = run.bytes("y");
      for (int i = 1; i < 1000; ++i) {
        run.run(executables);
        REQUIRE(run.bytes("y") == first);
      }
    }
}
