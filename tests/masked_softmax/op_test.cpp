#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "kernels/masked_softmax/masked_softmax.hpp"
#include "support/fuzz_cases.hpp"
#include "support/op_reference.hpp"
#include "support/op_run.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem softmax_problem(DeviceKind kind, const std::string& pass, DType dtype,
                        std::map<std::string, std::int64_t> sizes,
                        std::map<std::string, std::string> options = {}) {
  return canonical(masked_softmax_op(),
                   {"masked-softmax", pass, dtype, std::move(sizes), std::move(options)}, kind);
}

Problem random_softmax(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const std::string pass = draw.of({"fwd", "bwd"});
  const auto [rows, n] = draw.matrix(most_elements);
  const std::int64_t b = std::min(draw.size(2), rows);
  const std::int64_t heads = std::min(draw.size(2), std::max<std::int64_t>(1, rows / b));
  const std::int64_t s = std::max<std::int64_t>(1, rows / b / heads);
  std::map<std::string, std::int64_t> sizes{{"s", s}, {"b", b}, {"heads", heads}};
  if (n != s) sizes["n"] = n;
  std::map<std::string, std::string> options;
  options["mask"] =
      pass == "fwd" ? draw.of({"none", "causal", "bool"}) : draw.of({"none", "causal"});
  if (options["mask"] == "bool") options["mask-heads"] = draw.of({"one", "each"});
  if (draw.below(2)) options["scale"] = "0.125";
  return softmax_problem(kind, pass, draw.of(masked_softmax_op().dtypes(kind)), sizes, options);
}

}  // namespace

TEST_CASE("the reference of masked-softmax is the formula, by hand") {
  const std::map<std::string, std::int64_t> sizes{{"s", 2}, {"b", 1}, {"heads", 1}, {"n", 3}};
  const ReferenceTensors in{{"x", {0, std::log(3.0), 5, 1, 1, 1}}, {"mask", {1, 7, 0, 0, 0, 0}}};
  const auto y_of = [&](std::map<std::string, std::string> options) {
    return run_reference(
               softmax_problem(DeviceKind::cpu, "fwd", DType::f32, sizes, std::move(options)), in)
        .at("y");
  };
  const auto masked = y_of({{"mask", "bool"}});
  CHECK(masked[0] == Approx(0.25));
  CHECK(masked[1] == Approx(0.75));
  CHECK(masked[2] == 0);
  CHECK(std::all_of(masked.begin() + 3, masked.end(), [](double y) { return y == 0; }));
  // The first of two rows stands at the second of three columns.
  const auto causal = y_of({{"mask", "causal"}, {"scale", "2"}});
  CHECK(causal[0] == Approx(0.1));
  CHECK(causal[1] == Approx(0.9));
  CHECK(causal[2] == 0);
  CHECK(causal[5] == Approx(1 / 3.0));
  const auto dx =
      run_reference(softmax_problem(DeviceKind::cpu, "bwd", DType::f32, sizes, {{"scale", "2"}}),
                    {{"y", {0.5, 0.25, 0.25, 1, 0, 0}}, {"dy", {1, 2, 3, 4, 5, 6}}})
          .at("dx");
  CHECK(dx[0] == Approx(2 * 0.5 * (1 - 1.75)));
  CHECK(dx[2] == Approx(2 * 0.25 * (3 - 1.75)));
  CHECK(dx[3] == 0);
}

TEST_CASE("a mask's heads are of a mask in memory") {
  CHECK_THROWS_WITH(
      softmax_problem(DeviceKind::cpu, "fwd", DType::f32, {{"s", 2}, {"b", 1}, {"heads", 1}},
                      {{"mask-heads", "each"}}),
      "masked-softmax: mask-heads=each without mask=bool: there is no mask in memory");
}

TEST_CASE("masked-softmax may write where it reads") {
  const auto backend = open_cpu();
  check_in_place(*backend, masked_softmax_op(),
                 softmax_problem(DeviceKind::cpu, "fwd", DType::bf16,
                                 {{"s", 33}, {"b", 2}, {"heads", 2}}, {{"mask", "causal"}}),
                 {{"y", "x"}});
}

const FuzzCases<masked_softmax_op, random_softmax, FuzzCounts{.small = 2000, .gpu = 300}>
    softmax_cases;
