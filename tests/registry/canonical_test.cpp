#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "registry/op.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "support/fake_op.hpp"

using namespace fftune;
using fftune::testing::fake_problem;
using fftune::testing::FakeOp;

namespace {

/// The one line that canonical() says of a problem that it refuses.
std::string complaint(const Problem& problem) {
  return test::error_of(ErrorKind::invalid_input,
                        [&] { canonical(FakeOp({"only"}), problem, DeviceKind::cpu); });
}

}  // namespace

TEST_CASE("defaults are filled in, and a canonical problem stays as it is") {
  const FakeOp op({"only"});
  Problem sparse;
  sparse.op = "quadruple";
  sparse.sizes = {{"n", 64}, {"m", 3}};
  const Problem whole = canonical(op, sparse, DeviceKind::cpu);
  REQUIRE(whole == fake_problem(3, 64));
  REQUIRE(canonical(op, whole, DeviceKind::cpu) == whole);
}

TEST_CASE("each wrong field is named, with what to use") {
  const Problem good = fake_problem(3, 64);
  REQUIRE(complaint(good).empty());

  Problem problem = good;
  problem.op = "ffn";
  REQUIRE(complaint(problem) == "quadruple: the problem is of op 'ffn'");

  problem = good;
  problem.pass = "sideways";
  REQUIRE(complaint(problem) == "quadruple: there is no pass 'sideways': use fwd or bwd");

  problem = good;
  problem.dtype = DType::fp16;
  REQUIRE(complaint(problem) == "quadruple: dtype fp16 is not supported on the CPU: use f32, bf16");

  problem = good;
  problem.sizes["k"] = 4;
  REQUIRE(complaint(problem) == "quadruple: there is no size 'k': sizes are m, n");

  problem = good;
  problem.sizes.erase("n");
  REQUIRE(complaint(problem) == "quadruple: size 'n' (columns) is missing");

  problem = good;
  problem.options["residual"] = "yes";
  REQUIRE(complaint(problem) ==
          "quadruple: there is no option 'residual': options are act, bias, eps");

  problem = good;
  problem.options["act"] = "swish";
  REQUIRE(complaint(problem) == "quadruple: act=swish is not a choice: use silu, relu");
}

TEST_CASE("a number has one form, and a range") {
  Problem problem = fake_problem(3, 64);
  for (const char* text : {"1e-5", "0.00001", "1.0E-05"}) {
    problem.options["eps"] = text;
    const Problem whole = canonical(FakeOp({"only"}), problem, DeviceKind::cpu);
    CHECK(whole.option("eps") == "1e-05");
    CHECK(whole.number("eps") == 1e-5);
  }
  for (const char* text : {"0", "1"}) {  // the least and the most
    problem.options["eps"] = text;
    CHECK(complaint(problem).empty());
  }
  for (const char* text : {"", "small", "1e-5x", "-1e-9", "1.5", "nan", "inf", "1e400"}) {
    problem.options["eps"] = text;
    CHECK(complaint(problem) ==
          "quadruple: eps=" + std::string(text) + " is out of range: use a number from 0 to 1");
  }
  CHECK_THROWS_AS(problem.number("act"), Error);
}

TEST_CASE("sizes are in range to the last one") {
  for (const std::int64_t n : {std::int64_t{1}, std::int64_t{4096}})
    REQUIRE(complaint(fake_problem(1, n)).empty());
  for (const std::int64_t n :
       {std::int64_t{0}, std::int64_t{-1}, std::int64_t{4097}, std::int64_t{1} << 31,
        std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()})
    REQUIRE(complaint(fake_problem(1, n)) ==
            "quadruple: n=" + std::to_string(n) + " is out of range: use 1 to 4096");
}

TEST_CASE("any problem is either refused in one line or becomes canonical") {
  std::mt19937 random(11);
  const auto pick = [&](const std::vector<std::string>& words) {
    return words[std::uniform_int_distribution<std::size_t>(0, words.size() - 1)(random)];
  };
  const FakeOp op({"only"});
  int accepted = 0;
  for (int i = 0; i < 5000; ++i) {
    Problem problem;
    problem.op = pick({"quadruple", "quadruple", "quadruple", "", "ffn"});
    problem.pass = pick({"", "fwd", "bwd", "up"});
    problem.dtype = std::vector{DType::f32, DType::bf16, DType::fp16}[random() % 3];
    for (int k = 0; k < 2; ++k) {
      problem.sizes[pick({"m", "n", "m", "n", "x"})] =
          static_cast<std::int64_t>(random() % 5000) - 100;
      if (random() % 2) problem.options[pick({"act", "bias", "z"})] = pick({"silu", "no", "yes"});
    }
    const std::string why = complaint(problem);
    REQUIRE(why.find('\n') == why.npos);
    if (!why.empty()) continue;
    ++accepted;
    const Problem whole = canonical(op, problem, DeviceKind::cpu);
    REQUIRE(complaint(whole).empty());
    REQUIRE(whole.sizes == problem.sizes);
    REQUIRE(whole.options.size() == op.options().size());
    for (const auto& [name, value] : problem.options) REQUIRE(whole.option(name) == value);
    REQUIRE(whole.number("eps") == 1e-6);
  }
  REQUIRE(accepted > 100);
}

TEST_CASE("an op costs its stages' operations, and its inputs and outputs once") {
  const Cost cost = cost_of(FakeOp({"first", "second", "third"}), fake_problem(10, 64));
  REQUIRE(cost.flops == 3 * 640.0);
  REQUIRE(cost.bytes == 2 * 640 * 4.0);
}

TEST_CASE("an op costs only the part of a tensor that it reads") {
  struct HalfRead final : FakeOp {
    using FakeOp::FakeOp;
    std::vector<TensorSpec> tensors(const Problem& problem) const override {
      auto tensors = FakeOp::tensors(problem);
      tensors.front().read_share = 0.5;
      return tensors;
    }
  };
  CHECK(cost_of(HalfRead({"first", "second"}), fake_problem(10, 64)).bytes == 1.5 * 640 * 4.0);
  // A single stage says itself what it moves.
  CHECK(cost_of(HalfRead({"only"}), fake_problem(10, 64)).bytes == 2 * 640 * 4.0);
}

TEST_CASE("a tensor past 2^31 bytes has its size in 64 bits") {
  const TensorSpec tensor{"x", DType::bf16, {1 << 20, 1 << 14}, Role::input, 1.0};
  REQUIRE(tensor.elements() == std::int64_t{1} << 34);
  REQUIRE(tensor.bytes() == std::size_t{1} << 35);
  REQUIRE(tensor_index({tensor}, "x") == 0);
  REQUIRE_THROWS_AS(tensor_index({tensor}, "y"), Error);
}
