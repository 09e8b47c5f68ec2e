// ffn with tokens that the op quantises to e4m3: hidden by a stage of its own, or in the epilogue.
#include <map>
#include <random>
#include <string>

#include "cpu/open.hpp"
#include "kernels/ffn/ffn.hpp"
#include "support/op_run.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

std::vector<Problem> forms_of(std::int64_t m, std::int64_t d, std::int64_t h, DType dtype) {
  std::vector<Problem> problems;
  const auto add = [&](std::map<std::string, std::string> options) {
    options.emplace("act", "silu");
    problems.push_back({"ffn", "fwd", dtype, {{"m", m}, {"d", d}, {"h", h}}, std::move(options)});
  };
  for (const char* quantise : {"token", "block"}) {
    add({{"quantise", quantise}});
    add({{"quantise", quantise}, {"bias", "down"}, {"residual", "yes"}, {"norm", "rms"}});
    add({{"quantise", quantise}, {"gate", "no"}, {"bias", "both"}, {"act", "gelu"}});
  }
  return problems;
}

}  // namespace

TEST_CASE("ffn has a stage for hidden where its scale is the token's", "[quantise]") {
  const auto names = [](const Problem& problem) {
    std::vector<std::string> all;
    for (const StageSpec& stage : ffn_op().stages(problem)) all.push_back(stage.name);
    return all;
  };
  const auto problems = forms_of(4, 256, 128, DType::bf16);
  using Names = std::vector<std::string>;
  CHECK(names(problems[0]) == Names{"quantise", "gate_up", "quantise_hidden", "down"});
  CHECK(names(problems[3]) == Names{"quantise", "gate_up", "down"});
  CHECK(names(problems[5]) == Names{"quantise", "up", "quantise_hidden", "down"});
}

TEST_CASE("ffn with quantised tokens is right on the CPU at ragged sizes", "[quantise]") {
  const auto backend = open_cpu();
  std::mt19937_64 random(1);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    verify_families(*backend, ffn_op(), forms_of(2, 3, 5, dtype), random, 1);
    verify_families(*backend, ffn_op(), forms_of(33, 130, 267, dtype), random, 1);
  }
}

TEST_CASE("ffn with quantised tokens is right on a GPU", "[quantise][gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(3);
  for (const DType dtype : {DType::bf16, DType::fp16, DType::f32})
    for (const std::int64_t m : {1, 50, 333})
      verify_families(*backend, ffn_op(), forms_of(m, 272, 400, dtype), random, 2);
  verify_families(*backend, ffn_op(), forms_of(64, 2048, 5632, DType::bf16), random, 2);
}
