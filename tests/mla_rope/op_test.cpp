// mla-rope: its definition by hand, its refusals, and every family against the reference.
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "kernels/mla_rope/mla_rope.hpp"
#include "support/error_of.hpp"
#include "support/fuzz_cases.hpp"
#include "support/op_reference.hpp"
#include "support/op_run.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem rope_problem(DeviceKind kind, DType dtype, Sizes sizes, Options options = {}) {
  return canonical(mla_rope_op(), {"mla-rope", "fwd", dtype, std::move(sizes), std::move(options)},
                   kind);
}

Problem random_problem(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  Sizes sizes{{"rank", draw.of<std::int64_t>({1, 3, 8, 24, 64, 160, 256, 512})},
              {"rope", draw.of<std::int64_t>({2, 6, 8, 32, 64})},
              {"nope", draw.of<std::int64_t>({1, 5, 16, 64, 128})},
              {"heads", draw.size(4)}};
  const std::int64_t token =
      sizes["heads"] * (sizes["nope"] + 2 * sizes["rope"]) + 2 * (sizes["rank"] + sizes["rope"]);
  sizes["m"] = std::min(draw.size(9), std::max<std::int64_t>(1, most_elements / token));
  if (draw.below(2)) sizes["cache-slots"] = 1 + draw.below(2 * sizes["m"]);
  Options options{{"rotation", draw.of({"halves", "interleaved", "none"})}};
  if (options["rotation"] == "interleaved") options["rope-order"] = draw.of({"same", "halves"});
  if (options["rotation"] != "none") {
    options["angles"] = draw.of({"table", "base", "llama3", "yarn"});
    if (options["angles"] == "table") sizes["positions"] = 1 + draw.below(100);
    if (draw.below(8) == 0) options["scale"] = "1.5";
  }
  if (draw.below(4) == 0) options["eps"] = "0.01";
  return rope_problem(kind, draw.of(mla_rope_op().dtypes(kind)), sizes, options);
}

std::string complaint(Sizes more, const Options& options) {
  more.insert({{"m", 5}, {"heads", 2}, {"nope", 4}, {"rope", 4}, {"rank", 8}});
  return error_of([&] { rope_problem(DeviceKind::cuda, DType::bf16, more, options); });
}

/// One token, two heads of one feature and four that are rotated, by a quarter and by a half.
ReferenceTensors by_hand(const Options& options) {
  const double quarter = std::acos(-1.0) / 2;
  const bool halves = options.at("rotation") == "halves";
  const std::vector<double> angles = halves ? std::vector<double>{quarter, 2 * quarter, 0, 0}
                                            : std::vector<double>{quarter, 0, 2 * quarter, 0};
  const Problem problem = rope_problem(DeviceKind::cpu, DType::f32,
                                       {{"m", 1},
                                        {"heads", 2},
                                        {"nope", 1},
                                        {"rope", 4},
                                        {"rank", 2},
                                        {"positions", 1},
                                        {"cache-slots", 2}},
                                       [&] {
                                         Options all = options;
                                         all["eps"] = "0";
                                         return all;
                                       }());
  return test::run_reference(problem, {{"q", {9, 1, 2, 3, 4, 9, 5, 6, 7, 8}},
                                       {"kv", {3, 4, 10, 20, 30, 40}},
                                       {"norm", {1, 10}},
                                       {"positions", {7}},  // past the end: the last row
                                       {"angles", angles},
                                       {"cache", std::vector<double>(12, -1)},
                                       {"slots", {1}}});
}

}  // namespace

TEST_CASE("the reference of mla-rope is the definition, by hand") {
  const auto near = [](const std::vector<double>& values, const std::vector<double>& right) {
    REQUIRE(values.size() == right.size());
    for (std::size_t i = 0; i < values.size(); ++i)
      CHECK(values[i] == Approx(right[i]).margin(1e-9));
  };
  const double root = std::sqrt(12.5);
  // Pairs (1, 3) by a quarter and (2, 4) by a half.
  auto found = by_hand({{"rotation", "halves"}});
  near(found.at("q_rope"), {-3, -2, 1, -4, -7, -6, 5, -8});
  near(found.at("cache"), {-1, -1, -1, -1, -1, -1, 3 / root, 40 / root, -30, -20, 10, -40});
  // Pairs (1, 2) and (3, 4).
  found = by_hand({{"rotation", "interleaved"}});
  near(found.at("q_rope"), {-2, 1, -3, -4, -6, 5, -7, -8});
  near(found.at("cache"), {-1, -1, -1, -1, -1, -1, 3 / root, 40 / root, -20, 10, -30, -40});
  found = by_hand({{"rotation", "interleaved"}, {"rope-order", "halves"}});
  near(found.at("q_rope"), {-2, -3, 1, -4, -6, -7, 5, -8});
  near(found.at("cache"), {-1, -1, -1, -1, -1, -1, 3 / root, 40 / root, -20, -30, 10, -40});
}

TEST_CASE("mla-rope refuses fields that do not go together") {
  CHECK(complaint({}, {}) == "");
  CHECK(complaint({{"rope", 3}}, {}).find("rope=3 is odd") != std::string::npos);
  CHECK(complaint({{"rope", 3}}, {{"rotation", "none"}}) == "");
  CHECK(complaint({}, {{"rope-order", "halves"}}).find("is of rotation=interleaved") !=
        std::string::npos);
  CHECK(complaint({{"positions", 8}}, {{"angles", "base"}}).find("there is none") !=
        std::string::npos);
  CHECK(complaint({}, {{"angles", "llama3"}, {"low", "4"}, {"high", "2"}}).find("not above low") !=
        std::string::npos);
}

TEST_CASE("on the CPU a slot beyond the cache is none, as a negative one is") {
  const auto backend = open_cpu();
  const Problem problem = rope_problem(
      DeviceKind::cpu, DType::f32,
      {{"m", 3}, {"heads", 2}, {"nope", 3}, {"rope", 4}, {"rank", 8}, {"cache-slots", 4}},
      {{"rotation", "none"}});
  const auto cache = [&](const std::vector<float>& slots) {
    OpRun run(*backend, mla_rope_op(), problem);
    run.set("slots", slots);
    run.run(mla_rope_op(), problem, default_recipe(mla_rope_op(), problem, backend->facts()));
    return run.values("cache");
  };
  CHECK(cache({1, 1000000, 4}) == cache({1, -1, -1}));
  CHECK(cache({1, 3, 0}) != cache({1, -1, -1}));
}

const FuzzCases<mla_rope_op, random_problem, FuzzCounts{.small = 1500, .larger = 20, .gpu = 100}>
    mla_rope_cases;
