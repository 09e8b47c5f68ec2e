// linear-cross-entropy against the float64 reference: ragged sizes, every form, one chunk and many.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "cpu/open.hpp"
#include "device/facts.hpp"
#include "kernels/linear_cross_entropy/linear_cross_entropy.hpp"
#include "support/fuzz_cases.hpp"
#include "support/op_reference.hpp"
#include "support/op_run.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

const Op& op() {
  return linear_cross_entropy_op();
}

struct HeadSizes {
  std::int64_t m, d, vocab;
};

Problem problem_of(DeviceKind kind, const std::string& pass, const HeadSizes& sizes, DType dtype,
                   Options options) {
  return canonical(op(),
                   {"linear-cross-entropy",
                    pass,
                    dtype,
                    {{"m", sizes.m}, {"d", sizes.d}, {"vocab", sizes.vocab}},
                    std::move(options)},
                   kind);
}

Options random_options(Draw& draw, const std::string& pass) {
  Options options{{"reduction", draw.of({"none", "sum", "mean"})},
                  {"bias", draw.of({"no", "yes"})},
                  {"class-weights", draw.of({"no", "yes"})},
                  // MiB: chunks of 8 rows, of some, and one.
                  {"workspace", draw.of({"0", "0.05", "64"})}};
  if (draw.below(3) == 0) options["label-smoothing"] = "0.1";
  if (draw.below(3) == 0) options["z-loss"] = "0.001";
  if (draw.below(3) == 0) options["softcap"] = "5";
  bool gradients = pass == "bwd";
  if (pass == "fwd") {
    options["logprobs"] = draw.of({"no", "yes"});
    options["entropy"] = draw.of({"no", "yes"});
    gradients = draw.below(3) > 0;
    if (gradients) options["gradients"] = "yes";
  }
  if (gradients)
    (draw.below(3) == 0 ? options["frozen"] : options["accumulate"]) = draw.of({"no", "yes"});
  return options;
}

Problem random_problem(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const std::string pass = draw.of({"fwd", "bwd"});
  // The loss of a single id is 0, to which no error can be relative.
  auto [m, vocab] = draw.matrix(most_elements, 3000);
  vocab = std::max<std::int64_t>(vocab, 2);
  std::int64_t d = draw.size(7);
  if (draw.below(2)) d = (d + 7) / 8 * 8;
  Options options = random_options(draw, pass);
  // By the sizes, so that the draws of the other problems stay.
  if (!options.contains("gradients") && (m + d + vocab) % 4 == 0) {
    options["slice-of"] = std::to_string(vocab + vocab % 3 * 50);
    options["reduction"] = "none";
    options["class-weights"] = "no";
  }
  return problem_of(kind, pass, {m, d, vocab}, draw.of(op().dtypes(kind)), std::move(options));
}

}  // namespace

TEST_CASE("the gradients of linear-cross-entropy's reference are those of its differences") {
  const HeadSizes sizes{3, 2, 4};
  const Options options{
      {"reduction", "mean"}, {"bias", "yes"}, {"label-smoothing", "0.1"}, {"z-loss", "0.02"}};
  Options both = options;
  both["gradients"] = "yes";
  ReferenceTensors in{{"x", {0.3, -1, 2, 0.5, -0.7, 1.1}},
                      {"w", {1, 0.5, -0.5, 0.2, 0.8, -1.5, 0.1, 0.9}},
                      {"bias", {0.1, -0.2, 0.3, 0}},
                      {"labels", {2, -100, 0}},
                      {"items", {2}}};
  HostThreads threads;
  const auto run = [&](const Options& given, ReferenceTensors tensors) {
    const Problem problem = problem_of(DeviceKind::cpu, "fwd", sizes, DType::f32, given);
    for (std::size_t stage = 0; stage < op().stages(problem).size(); ++stage)
      op().reference(problem, stage, tensors, threads);
    return tensors;
  };
  const ReferenceTensors results = run(both, in);
  constexpr double step = 1e-5;
  for (const auto& [input, gradient] :
       {std::pair{"x", "dx"}, std::pair{"w", "dw"}, std::pair{"bias", "dbias"}})
    for (std::size_t i = 0; i < in.at(input).size(); ++i) {
      CAPTURE(input, i);
      const auto loss_at = [&](double by) {
        ReferenceTensors moved = in;
        moved[input][i] += by;
        return run(options, moved).at("loss")[0];
      };
      CHECK(results.at(gradient)[i] ==
            Approx((loss_at(step) - loss_at(-step)) / (2 * step)).margin(1e-8));
    }
}

TEST_CASE("chunks of linear-cross-entropy take the workspace that they may") {
  const auto rows = [](std::int64_t m, std::int64_t vocab, const char* workspace) {
    return linear_cross_entropy::chunk_rows(problem_of(DeviceKind::cuda, "fwd", {m, 64, vocab},
                                                       DType::bf16, {{"workspace", workspace}}));
  };
  CHECK(rows(8192, 131072, "1024") == 4096);
  CHECK(rows(8192, 131072, "512") == 2048);
  CHECK(rows(8192, 128256, "512") == 2048);  // four chunks, of the 2089 rows that there is room for
  CHECK(rows(5000, 131072, "1024") == 2560);
  CHECK(rows(100, 131072, "1024") == 100);
  CHECK(rows(100, 131072, "0") == 8);
  CHECK(rows(100, 262144, "16") == 32);
}

TEST_CASE("linear-cross-entropy keeps to its workspace and makes no logits beside it") {
  const auto backend = open_cpu();
  const Problem problem = problem_of(DeviceKind::cpu, "fwd", {512, 8, 4096}, DType::f32,
                                     {{"workspace", "2"}, {"gradients", "yes"}});
  for (const Family* family : op().families()) {
    if (family->refusal(problem, backend->facts())) continue;
    CAPTURE(family->name());
    const Program program = family->program(problem, backend->facts(),
                                            family->default_config(problem, backend->facts()));
    CHECK(program.scratch.at(0).bytes == std::size_t{2} << 20);
    // Those behind the buffers are the logits and their gradients, which the plan leaves out.
    CHECK(program.host_tensors + 2 == op().tensors(problem).size());
  }
}

TEST_CASE("a cluster of blocks holds a row of linear-cross-entropy that one block cannot hold") {
  const auto cluster = [](const char* arch, std::int64_t vocab, Options options) {
    const DeviceFacts facts = products_of_architecture(arch).front();
    const Problem problem =
        problem_of(DeviceKind::cuda, "fwd", {64, 64, vocab}, DType::bf16, std::move(options));
    for (const Family* family : op().families())
      if (!family->is_fallback() && !family->refusal(problem, facts)) {
        const Config config = family->default_config(problem, facts);
        CHECK(family->space(problem, facts).violations(config).empty());
        return config.at("cluster");
      }
    return std::int64_t{0};
  };
  const Options gradients{{"gradients", "yes"}};
  CHECK(cluster("sm_90a", 32000, gradients) == 1);
  CHECK(cluster("sm_90a", 50304, gradients) == 2);
  CHECK(cluster("sm_90a", 128256, gradients) == 4);
  CHECK(cluster("sm_90a", 262144, gradients) == 8);
  CHECK(cluster("sm_90a", 524288, gradients) == 1);  // read twice
  CHECK(cluster("sm_90a", 128256, {}) == 1);         // read once, as it has no gradient
  CHECK(cluster("sm_80", 128256, gradients) == 1);
}

TEST_CASE("GEMMs of large chunks of linear-cross-entropy have the tiles that were fastest") {
  const DeviceFacts facts = products_of_architecture("sm_90a").front();
  const auto tiles = [&](std::int64_t m, const char* workspace) {
    const Problem problem = problem_of(DeviceKind::cuda, "fwd", {m, 2048, 128256}, DType::bf16,
                                       {{"gradients", "yes"}, {"workspace", workspace}});
    const Family& family = *op().families()[1];
    std::set<std::string> found;
    for (const KernelSource& kernel :
         family.program(problem, facts, family.default_config(problem, facts)).kernels)
      if (const auto at = kernel.expression.find(".bm = "); at != std::string::npos)
        found.insert(kernel.expression.substr(at, kernel.expression.find(", .mma", at) - at));
    return found;
  };
  const auto of = [](const char* bm, const char* bn, const char* schedule) {
    return std::string(".bm = ") + bm + ", .bn = " + bn +
           ", .schedule = fftune::sm90_schedule::" + schedule;
  };
  const std::string wide = of("128", "256", "cooperative");
  CHECK(tiles(4096, "1024") == std::set{of("128", "192", "pingpong"), wide,  // logits and dx
                                        of("256", "128", "cooperative")});   // dw
  CHECK(!tiles(64, "1024").contains(of("128", "192", "pingpong")));          // by the cost model
}

TEST_CASE("options of gradients are refused where there are none") {
  CHECK_THROWS_WITH(problem_of(DeviceKind::cpu, "fwd", {2, 2, 2}, DType::f32, {{"frozen", "yes"}}),
                    "linear-cross-entropy: frozen=yes is of gradients: give gradients=yes");
  CHECK_THROWS_WITH(problem_of(DeviceKind::cpu, "bwd", {2, 2, 2}, DType::f32,
                               {{"frozen", "yes"}, {"accumulate", "yes"}}),
                    "linear-cross-entropy: accumulate=yes with frozen=yes: nothing is added to");
  CHECK_THROWS_WITH(problem_of(DeviceKind::cpu, "fwd", {2, 2, 2}, DType::f32,
                               {{"slice-of", "4"}, {"gradients", "yes"}}),
                    "linear-cross-entropy: slice-of with gradients=yes: they need the log-sum-exp "
                    "of all slices, which the pass bwd takes");
}

TEST_CASE("gradients of linear-cross-entropy accumulate in place") {
  const auto backend = open_cpu();
  check_in_place(
      *backend, op(),
      problem_of(
          DeviceKind::cpu, "fwd", {33, 24, 70}, DType::bf16,
          {{"bias", "yes"}, {"gradients", "yes"}, {"accumulate", "yes"}, {"workspace", "0"}}),
      {{"dw", "dw_before"}, {"dbias", "dbias_before"}});
}

TEST_CASE("linear-cross-entropy is right on a GPU in several chunks of whole tiles", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(5);
  for (const HeadSizes sizes : {HeadSizes{600, 256, 4096}, {1000, 520, 8008}})
    for (const auto& [pass, more] :
         {std::pair{"fwd", Options{{"gradients", "yes"}, {"reduction", "mean"}}},
          std::pair{"fwd", Options{{"gradients", "yes"}, {"bias", "yes"}, {"accumulate", "yes"}}},
          std::pair{"bwd", Options{{"bias", "yes"}, {"label-smoothing", "0.1"}}}}) {
      Options options = more;
      options["workspace"] = "2";
      const Problem problem = problem_of(DeviceKind::cuda, pass, sizes, DType::bf16, options);
      REQUIRE(verify_variants(*backend, op(), problem, random, 1) > 0);
    }
}

TEST_CASE("rows of linear-cross-entropy that clusters share are right on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(6);
  const Options plain{{"gradients", "yes"}, {"reduction", "mean"}};
  Options every = plain;
  every.insert({{"class-weights", "yes"},
                {"label-smoothing", "0.1"},
                {"softcap", "5"},
                {"entropy", "yes"},
                {"logprobs", "yes"}});
  // Fewer elements of dw for more ids: of 16 million, one was beyond the tolerance of an element,
  // by the rounding of a large logit, in all families alike.
  for (const auto& [sizes, options] :
       {std::pair{HeadSizes{9, 64, 32768}, every}, std::pair{HeadSizes{9, 64, 40008}, every},
        std::pair{HeadSizes{9, 64, 128256}, plain}, std::pair{HeadSizes{9, 8, 262144}, plain}}) {
    const Problem problem = problem_of(DeviceKind::cuda, "fwd", sizes, DType::bf16, options);
    REQUIRE(verify_variants(*backend, op(), problem, random, 1) > 0);
  }
}

TEST_CASE("on a GPU too, gradients of linear-cross-entropy accumulate in place", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  check_in_place(
      *backend, op(),
      problem_of(
          DeviceKind::cuda, "fwd", {300, 136, 2056}, DType::bf16,
          {{"bias", "yes"}, {"gradients", "yes"}, {"accumulate", "yes"}, {"workspace", "0.6"}}),
      {{"dw", "dw_before"}, {"dbias", "dbias_before"}});
}

const FuzzCases<op, random_problem,
                FuzzCounts{.small = 600, .larger = 25, .gpu = 200, .gpu_bits = 18, .spaces = 0}>
    linear_cross_entropy_cases;
