// head-linear: its definition by hand, its refusals, and every family against the reference.
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "kernels/head_linear/head_linear.hpp"
#include "support/error_of.hpp"
#include "support/fuzz_cases.hpp"
#include "support/op_reference.hpp"
#include "support/op_run.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem head_problem(DeviceKind kind, DType dtype, Sizes sizes, Options options = {}) {
  return canonical(head_linear_op(),
                   {"head-linear", "fwd", dtype, std::move(sizes), std::move(options)}, kind);
}

Problem random_problem(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const auto root = std::max<std::int64_t>(1, most_elements / 64);
  Sizes sizes{{"k", std::min({draw.size(9), head_linear::most_features, root})},
              {"heads", draw.size(3)}};
  sizes["n"] = std::min({draw.size(9), head_linear::most_features,
                         std::max<std::int64_t>(1, most_elements / (sizes["k"] * sizes["heads"]))});
  const Options options{{"layout", draw.of({"nk", "kn"})}};
  if (draw.below(2)) sizes["x-head"] = sizes["k"] + draw.below(20);
  if (draw.below(2)) sizes["w-skip"] = 1 + draw.below(20);
  if (draw.below(2))
    sizes["w-rows"] = sizes[options.at("layout") == "nk" ? "n" : "k"] +
                      (sizes.contains("w-skip") ? sizes["w-skip"] : 0) + draw.below(20);
  const std::int64_t token = sizes["heads"] * (sizes["k"] + sizes["n"] + 20);
  sizes["m"] =
      std::min(draw.size(draw.below(2) ? 7 : 3), std::max<std::int64_t>(1, most_elements / token));
  return head_problem(kind, draw.of(head_linear_op().dtypes(kind)), sizes, options);
}

std::string complaint(Sizes more, const Options& options) {
  more.insert({{"m", 5}, {"heads", 2}, {"n", 4}, {"k", 6}});
  return error_of([&] { head_problem(DeviceKind::cuda, DType::bf16, more, options); });
}

}  // namespace

TEST_CASE("the reference of head-linear is the definition, by hand") {
  // Two heads of two features; of each head in w a row before those of the product, and one behind.
  const Sizes sizes{{"m", 1}, {"heads", 2}, {"k", 2}, {"x-head", 3}, {"w-skip", 1}};
  const ReferenceTensors given{{"x", {1, 2, 99, 3, 4, 99}},
                               {"w", {99, 99, 1, 2, 3, 4, 99, 99, 99, 99, 5, 6, 7, 8, 99, 99}}};
  const auto found = [&](const char* layout) {
    Sizes own = sizes;
    own.insert({{"n", 2}, {"w-rows", 4}});
    return test::run_reference(head_problem(DeviceKind::cpu, DType::f32, own, {{"layout", layout}}),
                               given)
        .at("y");
  };
  CHECK(found("nk") == std::vector<double>{5, 11, 39, 53});
  CHECK(found("kn") == std::vector<double>{7, 10, 43, 50});
}

TEST_CASE("head-linear refuses fields that do not go together") {
  CHECK(complaint({}, {}) == "");
  CHECK(complaint({{"x-head", 5}}, {}).find("x-head=5 is less than k=6") != std::string::npos);
  CHECK(complaint({{"w-rows", 5}, {"w-skip", 2}}, {})
            .find("w-rows=5 is less than the 4 rows of a product and the 2 before them") !=
        std::string::npos);
  CHECK(complaint({{"w-rows", 5}}, {{"layout", "kn"}}).find("the 6 rows of a product") !=
        std::string::npos);
}

TEST_CASE("head-linear does not read what is between heads on the CPU") {
  const auto backend = open_cpu();
  for (const char* layout : {"nk", "kn"})
    for (const DType dtype : head_linear_op().dtypes(DeviceKind::cpu)) {
      const Problem problem = head_problem(DeviceKind::cpu, dtype,
                                           {{"m", 3},
                                            {"heads", 2},
                                            {"n", 5},
                                            {"k", 6},
                                            {"x-head", 9},
                                            {"w-skip", 2},
                                            {"w-rows", 11}},
                                           {{"layout", layout}});
      const head_linear::Layer layer = head_linear::layer_of(problem);
      std::vector<float> results[2];
      for (const bool hostile : {false, true}) {
        OpRun run(*backend, head_linear_op(), problem);
        const float foreign = hostile ? std::numeric_limits<float>::quiet_NaN() : 0;
        std::vector<float> x = run.values("x"), w = run.values("w");
        for (std::size_t i = 0; i < x.size(); ++i)
          if (static_cast<std::int64_t>(i) % layer.x_head >= layer.k) x[i] = foreign;
        for (std::size_t i = 0; i < w.size(); ++i) {
          const auto row = static_cast<std::int64_t>(i) / layer.columns() % layer.w_rows;
          if (row < layer.w_skip || row >= layer.w_skip + layer.rows()) w[i] = foreign;
        }
        run.set("x", x);
        run.set("w", w);
        run.run(head_linear_op(), problem,
                default_recipe(head_linear_op(), problem, backend->facts()));
        results[hostile] = run.values("y");
      }
      CHECK(results[0] == results[1]);
    }
}

const FuzzCases<head_linear_op, random_problem, FuzzCounts{.small = 1500, .larger = 20, .gpu = 100}>
    head_linear_cases;
