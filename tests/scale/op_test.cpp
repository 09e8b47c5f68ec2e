// scale against its reference, and that a factor of 1 leaves every bit, NaN's too, as it is.
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cpu/open.hpp"
#include "kernels/scale/scale.hpp"
#include "support/error_of.hpp"
#include "support/fuzz_cases.hpp"
#include "support/op_reference.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem random_problem(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const auto [m, h] = draw.matrix(most_elements);
  std::map<std::string, std::int64_t> sizes{{"m", m}, {"h", h}};
  const std::string factor = draw.of({"one", "one", "rows", "ids"});
  if (factor == "ids") sizes["factors"] = 1 + draw.below(40);
  return canonical(scale_op(),
                   {"scale",
                    "fwd",
                    draw.of(scale_op().dtypes(kind)),
                    std::move(sizes),
                    {{"in-place", draw.of({"yes", "no"})}, {"factor", factor}}},
                   kind);
}

/// Runs every family of the device on x.
void check_factor(Backend& backend, float factor) {
  const DeviceFacts& facts = backend.facts();
  const Problem problem =
      canonical(scale_op(), {"scale", "fwd", DType::f32, {{"m", 3}, {"h", 40}}, {}}, facts.kind);
  for (const Family* family : scale_op().families()) {
    if (family->refusal(problem, facts)) continue;
    CAPTURE(family->name(), factor);
    std::vector<float> x(120, 1.5f);
    x[7] = std::numeric_limits<float>::quiet_NaN();
    x[8] = std::numeric_limits<float>::denorm_min();
    const auto result =
        backend.compile(family->program(problem, facts, family->default_config(problem, facts)));
    REQUIRE(result.report.failure == "");
    const auto device = backend.allocate(480), given = backend.allocate(4);
    backend.write(device->data(), x.data(), 480);
    backend.write(given->data(), &factor, 4);
    void* const tensors[] = {device->data(), given->data()};
    result.executable->enqueue(tensors, nullptr, backend.stream());
    std::vector<float> after(120);
    backend.read(after.data(), device->data(), 480);
    if (factor == 1) {
      CHECK(std::memcmp(x.data(), after.data(), 480) == 0);
    } else {
      CHECK(after[0] == 1.5f * factor);
      CHECK(after[119] == 1.5f * factor);
      CHECK(std::isnan(after[7]));
    }
  }
}

void check_copy(Backend& backend) {
  const DeviceFacts& facts = backend.facts();
  const Problem problem = canonical(
      scale_op(), {"scale", "fwd", DType::f32, {{"m", 3}, {"h", 40}}, {{"in-place", "no"}}},
      facts.kind);
  for (const Family* family : scale_op().families()) {
    if (family->refusal(problem, facts)) continue;
    CAPTURE(family->name());
    const auto result =
        backend.compile(family->program(problem, facts, family->default_config(problem, facts)));
    REQUIRE(result.report.failure == "");
    const std::vector<float> x(120, 1.5f), other(120, -3.0f);
    const float factor = 1;
    const auto from = backend.allocate(480), given = backend.allocate(4),
               to = backend.allocate(480);
    backend.write(from->data(), x.data(), 480);
    backend.write(to->data(), other.data(), 480);
    backend.write(given->data(), &factor, 4);
    void* const tensors[] = {from->data(), given->data(), to->data()};
    result.executable->enqueue(tensors, nullptr, backend.stream());
    std::vector<float> after(120);
    backend.read(after.data(), to->data(), 480);
    CHECK(after == x);
  }
}

}  // namespace

TEST_CASE("the reference of scale is the formula") {
  const Problem problem = canonical(
      scale_op(), {"scale", "fwd", DType::f32, {{"m", 2}, {"h", 2}}, {}}, DeviceKind::cpu);
  const auto found = run_reference(problem, {{"x", {1, -2, 3, 0}}, {"factor", {-0.5}}});
  CHECK(found.at("x") == std::vector<double>{-0.5, 1, -1.5, 0});
  const Problem apart = canonical(
      scale_op(), {"scale", "fwd", DType::f32, {{"m", 2}, {"h", 2}}, {{"in-place", "no"}}},
      DeviceKind::cpu);
  const auto other = run_reference(apart, {{"x", {1, -2, 3, 0}}, {"factor", {-0.5}}});
  CHECK(other.at("x") == std::vector<double>{1, -2, 3, 0});
  CHECK(other.at("y") == std::vector<double>{-0.5, 1, -1.5, 0});
}

TEST_CASE("rows, or elements by their ids, may have factors of their own") {
  const auto with_factor = [](const char* factor) {
    Problem problem{"scale", "fwd", DType::f32, {{"m", 2}, {"h", 2}}, {{"in-place", "no"}}};
    problem.options["factor"] = factor;
    if (problem.has("factor", "ids")) problem.sizes["factors"] = 3;
    return canonical(scale_op(), problem, DeviceKind::cpu);
  };
  const std::vector<double> x{1, -2, 3, 5};
  const auto rows = run_reference(with_factor("rows"), {{"x", x}, {"factor", {2, -1}}});
  CHECK(rows.at("y") == std::vector<double>{2, -4, -3, -5});
  const auto ids = run_reference(with_factor("ids"),
                                 {{"x", x}, {"factor", {2, -1, 10}}, {"ids", {2, 0, -1, 3}}});
  CHECK(ids.at("y") == std::vector<double>{10, -4, 0, 0});
  CHECK(error_of([] {
          canonical(scale_op(),
                    {"scale", "fwd", DType::f32, {{"m", 2}, {"h", 2}, {"factors", 3}}, {}},
                    DeviceKind::cpu);
        }).find("factors are of factor=ids") != std::string::npos);
}

TEST_CASE("a factor of 1 copies x where the result is another tensor") {
  const auto backend = open_cpu();
  check_copy(*backend);
}

TEST_CASE("on a GPU too, a factor of 1 copies x", "[gpu][small]") {
  on_first_cuda(check_copy);
}

TEST_CASE("a factor of 1 moves nothing") {
  const auto backend = open_cpu();
  for (const float factor : {1.0f, 0.25f}) check_factor(*backend, factor);
}

TEST_CASE("on a GPU too, a factor of 1 moves nothing", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const float factor : {1.0f, 0.25f}) check_factor(*backend, factor);
}

const FuzzCases<scale_op, random_problem, FuzzCounts{.small = 200, .larger = 10, .gpu = 40}>
    scale_cases;
