// The stages of the ops that are made of GEMMs, against a recorded table of what each reads,
// writes, sums over and counts.
#include <fmt/format.h>

#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

using Options = std::map<std::string, std::string>;

struct Case {
  const char *op, *pass;
  DType dtype;
  Options options;
};

Problem problem_of(const Case& given) {
  Problem problem{given.op, given.pass, given.dtype, {{"m", 37}}, given.options};
  const bool linear = problem.op == "linear" || problem.op == "masked-linear";
  problem.sizes[linear ? "k" : "d"] = 200;
  problem.sizes[linear ? "n" : "h"] = 328;
  return canonical(builtin_catalog().op(problem.op), problem, DeviceKind::cuda);
}

std::vector<Case> cases() {
  std::vector<Case> cases;
  for (const char* save : {"none", "preact"})
    for (const Options& more : {Options{},
                                {{"bias", "down"}},
                                {{"bias", "down"}, {"residual", "yes"}},
                                {{"norm", "rms"}},
                                {{"norm", "add-rms"}, {"residual", "yes"}}}) {
      Options options = more;
      options["save"] = save;
      cases.push_back({"ffn", "fwd", DType::bf16, options});
      if (options.contains("norm")) continue;
      for (const char* scales : {"tensor", "block"}) {
        options["scales"] = scales;
        cases.push_back({"ffn", "fwd", DType::fp8, options});
      }
    }
  for (const char* accumulate : {"no", "yes"}) {
    for (const char* save : {"preact", "input"}) {
      const Options options{{"save", save}, {"accumulate", accumulate}};
      cases.push_back({"ffn", "bwd", DType::f32, options});
      cases.push_back({"masked-ffn", "bwd", DType::bf16, options});
    }
    for (const char* bias : {"no", "yes"}) {
      cases.push_back({"linear", "fwd", DType::fp16, {{"bias", bias}, {"residual", accumulate}}});
      cases.push_back({"linear", "bwd", DType::fp16, {{"bias", bias}, {"accumulate", accumulate}}});
    }
    cases.push_back({"masked-linear", "bwd", DType::bf16, {{"accumulate", accumulate}}});
  }
  cases.push_back({"masked-linear", "fwd", DType::f32, {{"mask", "random:0.5"}}});
  for (const char* save : {"none", "preact"})
    cases.push_back({"masked-ffn", "fwd", DType::bf16, {{"save", save}}});
  return cases;
}

std::vector<std::string> lines_of(const Problem& problem) {
  std::vector<std::string> lines{problem.text()};
  for (const StageSpec& stage : builtin_catalog().op(problem.op).stages(problem))
    lines.push_back(fmt::format("  {}: {} -> {}, sums of {}, {} flops, {} bytes", stage.name,
                                fmt::join(stage.inputs, " "), fmt::join(stage.outputs, " "),
                                stage.reduction_length, stage.flops, stage.bytes));
  return lines;
}

}  // namespace

TEST_CASE("the stages made of GEMMs read, write and count what they are recorded to") {
  std::ifstream recorded(FFTUNE_SOURCE_DIR "/tests/kernels/stages.txt");
  REQUIRE(recorded.good());
  std::string expected;
  for (const Case& given : cases())
    for (const std::string& line : lines_of(problem_of(given))) {
      REQUIRE(std::getline(recorded, expected));
      CHECK(line == expected);
    }
  CHECK_FALSE(std::getline(recorded, expected));
}
