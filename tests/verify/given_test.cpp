// Inputs that are given instead of drawn.
#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "support/catch.hpp"
#include "verify/distinct_rows.hpp"
#include "verify/host_threads.hpp"
#include "verify/toy_run.hpp"
#include "verify/truth.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Gives the input of one name the values 1, 2, 3, …
class Counting final : public GivenTensors {
 public:
  explicit Counting(std::string name) : name_(std::move(name)) {}
  bool fill(const TensorSpec& spec, std::span<std::byte> out, Parallel&) const override {
    if (spec.name != name_) return false;
    std::vector<float> values(static_cast<std::size_t>(spec.elements()));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i + 1);
    if (out.size() != spec.bytes()) FAIL("another size than the tensor's");
    encode(spec.dtype, std::span<const float>(values), out.data());
    return true;
  }

 private:
  std::string name_;
};

std::vector<float> drawn(const DistinctRows& rows, const std::string& name) {
  const std::size_t tensor = tensor_index(rows.tensors(), name);
  const auto& bytes = rows.drawn(tensor);
  std::vector<float> values(bytes.size() / dtype_bytes(rows.tensors()[tensor].dtype));
  decode(rows.tensors()[tensor].dtype, bytes.data(), std::span(values));
  return values;
}

}  // namespace

TEST_CASE("a given input has the given values, the others are those of the seed") {
  const ToyOp op;
  HostThreads threads;
  const Problem problem = ToyOp::problem(DType::f32, 100, 8, 12);
  const Counting a("a");
  const DistinctRows random(op, problem, 5, threads);
  const DistinctRows given(op, problem, {5, &a}, threads);
  CHECK(drawn(given, "x") == drawn(random, "x"));
  CHECK(drawn(given, "b") == drawn(random, "b"));
  const auto values = drawn(given, "a");
  CHECK(values != drawn(random, "a"));
  REQUIRE(values.size() == 8 * 12);
  CHECK(values.front() == 1);
  CHECK(values.back() == 8 * 12);
}

TEST_CASE("rows of tokens that are given stand for any number of tokens") {
  const ToyOp op;
  HostThreads threads;
  const Counting x("x");
  DistinctRows rows(op, ToyOp::problem(DType::f32, 3, 8, 12), {5, &x}, threads);
  const auto few = drawn(rows, "x");
  REQUIRE(few.size() == 3 * 8);
  rows.retoken(1000);
  const auto many = drawn(rows, "x");
  REQUIRE(many.size() == 61 * 8);
  CHECK(std::equal(few.begin(), few.end(), many.begin()));
}

TEST_CASE("verification computes from the given values") {
  const ToyOp op;
  HostBackend backend;
  const Problem problem = ToyOp::problem(DType::f32, 5, 8, 12);
  const Counting b("b");
  const Verifier::Executables executables{toy_stage(problem, 0), toy_stage(problem, 1)};
  Verifier random(backend, op, problem, 5);
  Verifier given(backend, op, problem, {5, &b});
  const auto plain = random.verify(0, 2, executables);
  const auto counted = given.verify(0, 2, executables);
  CHECK(plain.passed);
  CHECK(counted.passed);
  CHECK(plain.bits != counted.bits);
}

namespace {

/// Gives x a row that is 100 times the others.
class LargeRow final : public GivenTensors {
 public:
  bool fill(const TensorSpec& spec, std::span<std::byte> out, Parallel&) const override {
    if (spec.name != "x") return false;
    std::vector<float> values(static_cast<std::size_t>(spec.elements()));
    const auto columns = static_cast<std::size_t>(spec.shape.at(1));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = (static_cast<float>(i % 7) - 3) * (i / columns == 2 ? 100.0F : 1.0F);
    encode(spec.dtype, std::span<const float>(values), out.data());
    return true;
  }
};

}  // namespace

TEST_CASE("with given values the elements of a row have a bound from its own rounding errors") {
  const ToyOp op;
  HostThreads threads;
  const Problem problem = ToyOp::problem(DType::bf16, 40, 16, 24);
  Truth random(op, problem, 5, threads);
  CHECK(random.expected(0, toy_y).row_factors.empty());
  const LargeRow x;
  Truth given(op, problem, {5, &x}, threads);
  const auto& factors = given.expected(0, toy_y).row_factors;
  REQUIRE(factors.size() == 40);
  for (std::size_t row = 0; row < factors.size(); ++row)
    if (row != 2) CHECK(factors[row] == 1);
  // Nearly all of the errors are its own.
  CHECK(std::abs(factors[2] - std::sqrt(40.0)) < 0.1);
}
