// The verifier passes what is right, for every dtype, run of stages and number of tokens.
#include <string>

#include "core/error.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "verify/toy_run.hpp"
#include "verify/truth.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("a right result passes, stage by stage and as a whole") {
  for (const auto dtype : {DType::f32, DType::bf16, DType::fp16})
    for (const std::int64_t m : {1, 2, 60, 61, 62, 128, 301}) {
      HostBackend backend;
      const ToyOp op;
      const auto problem = ToyOp::problem(dtype, m, 40, 24);
      INFO(problem.text());
      Verifier verifier(backend, op, problem, 7);
      const auto first = toy_stage(problem, 0);
      const auto second = toy_stage(problem, 1);
      for (const auto& [begin, count] : {std::pair{0, 1}, {1, 1}, {0, 2}, {1, 1}}) {
        Verifier::Executables executables;
        for (int stage = begin; stage < begin + count; ++stage)
          executables.push_back(stage == 0 ? first : second);
        const auto result = verifier.verify(static_cast<std::size_t>(begin),
                                            static_cast<std::size_t>(count), executables);
        INFO(result.failure);
        CHECK(result.passed);
        CHECK(result.error <= result.tolerance);
        CHECK((result.error > 0 || m < 3));
      }
    }
}

TEST_CASE("results that agree in every bit are known by it, and one bit tells them apart") {
  HostBackend backend;
  const ToyOp op;
  const auto problem = ToyOp::problem(DType::bf16, 300, 40, 24);
  Verifier verifier(backend, op, problem, 7);
  const auto bits = [&](const Spoil& spoil) {
    const auto result = verifier.verify(1, 1, {toy_stage(problem, 1, spoil)});
    INFO(result.failure);
    CHECK(result.passed);
    CHECK(result.bits.size() == 16);
    return result.bits;
  };
  const auto plain = bits({});
  CHECK(bits({}) == plain);
  // The last bit of one element, in the middle and at the very end.
  for (const std::size_t place : {std::size_t{5000}, std::size_t{300 * 40 - 1}})
    CHECK(bits([place](void* const* t, void*) {
            static_cast<std::uint16_t*>(t[toy_y])[place] ^= 1;
          }) != plain);
  Verifier other(backend, op, problem, 8);
  CHECK(other.verify(1, 1, {toy_stage(problem, 1)}).bits != plain);
}

TEST_CASE("one element of each size passes: no sample is too small for its own tolerance") {
  for (const auto dtype : {DType::f32, DType::bf16, DType::fp16})
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
      HostBackend backend;
      const ToyOp op;
      const auto problem = ToyOp::problem(dtype, 1, 1, 1 + static_cast<std::int64_t>(seed % 5));
      Verifier verifier(backend, op, problem, seed);
      const auto result = verifier.verify(0, 2, {toy_stage(problem, 0), toy_stage(problem, 1)});
      INFO(problem.text() << " seed " << seed << ": " << result.failure);
      CHECK(result.passed);
    }
}

TEST_CASE("bf16 of a usual size errs as rounding does, and its tolerance is within the cap") {
  HostBackend backend;
  const ToyOp op;
  const auto problem = ToyOp::problem(DType::bf16, 61, 96, 128);
  Verifier verifier(backend, op, problem, 1);
  const auto stage = verifier.verify(0, 1, {toy_stage(problem, 0)});
  CHECK(stage.error > 1.4e-3);
  CHECK(stage.error < 1.9e-3);
  const auto whole = verifier.verify(0, 2, {toy_stage(problem, 0), toy_stage(problem, 1)});
  CHECK(whole.error > 2.0e-3);
  CHECK(whole.error < 2.7e-3);
  CHECK(whole.tolerance > 1.3 * whole.error);
  CHECK(whole.tolerance <= 3.5e-3);
}

TEST_CASE("tensors between the stages of a run need not be written") {
  HostBackend backend;
  const ToyOp op;
  const auto problem = ToyOp::problem(DType::f32, 70, 8, 12);
  Verifier verifier(backend, op, problem, 3);
  const auto fused = backend.compile(op.families()[0]->program(problem, backend.facts(), {}));
  const auto result = verifier.verify(0, 2, {fused.executable});
  INFO(result.failure);
  CHECK(result.passed);
}

TEST_CASE("another number of tokens keeps the weights, and the reference where it is known") {
  HostBackend backend;
  const ToyOp op;
  auto problem = ToyOp::problem(DType::f32, 200, 64, 48);
  Verifier verifier(backend, op, problem, 3);
  verifier.verify(0, 2, {toy_stage(problem, 0), toy_stage(problem, 1)});
  const int runs = op.reference_runs;
  for (const std::int64_t m : {1, 16, 61, 500}) {
    problem = problem.with_size("m", m);
    verifier.retoken(m);
    CHECK(verifier.problem().size("m") == m);
    const auto result = verifier.verify(0, 2, {toy_stage(problem, 0), toy_stage(problem, 1)});
    INFO(result.failure);
    CHECK(result.passed);
  }
  CHECK(op.reference_runs == runs);
}

TEST_CASE("growing from one token on gives the same inputs as starting large") {
  HostThreads threads;
  const ToyOp op;
  Truth grown(op, ToyOp::problem(DType::bf16, 1, 8, 4), 5, threads);
  const auto one_row = grown.encoded(toy_hidden);
  grown.retoken(1000);
  Truth large(op, ToyOp::problem(DType::bf16, 1000, 8, 4), 5, threads);
  for (const auto tensor : {toy_x, toy_a, toy_b, toy_y, toy_hidden})
    CHECK(grown.encoded(tensor) == large.encoded(tensor));
  CHECK(std::equal(one_row.begin(), one_row.end(), large.encoded(toy_hidden).begin()));
  CHECK(large.period(toy_x) == 61);
  CHECK(large.period(toy_a) == 4);
}

TEST_CASE("a square weight is not taken for a tensor of tokens") {
  HostThreads threads;
  const ToyOp op;
  Truth truth(op, ToyOp::problem(DType::f32, 100, 100, 100), 5, threads);
  CHECK(truth.period(toy_x) == 61);
  CHECK(truth.period(toy_a) == 100);
}

TEST_CASE("a problem that does not fit is refused with the bytes needed and there") {
  HostBackend backend;
  backend.limit = 100000;
  const ToyOp op;
  CHECK(error_of(ErrorKind::unavailable, [&] {
          Verifier verifier(backend, op, ToyOp::problem(DType::f32, 1000, 64, 4), 1);
        }).find("100000") != std::string::npos);
}

TEST_CASE("stages that are not there, or no executable, are errors of the caller") {
  HostBackend backend;
  const ToyOp op;
  const auto problem = ToyOp::problem(DType::f32, 4, 8, 4);
  Verifier verifier(backend, op, problem, 1);
  CHECK_THROWS_AS(verifier.verify(1, 2, {toy_stage(problem, 1)}), Error);
  CHECK_THROWS_AS(verifier.verify(0, 0, {}), Error);
  CHECK_THROWS_AS(verifier.verify(0, 1, {nullptr}), Error);
}
