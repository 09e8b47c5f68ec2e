#include "runtime/plan.hpp"

#include <string>
#include <vector>

#include "core/error.hpp"
#include "support/catch.hpp"
#include "support/host_backend.hpp"
#include "support/toy_op.hpp"
#include "verify/verifier.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

struct Refusal {
  ErrorKind kind = ErrorKind::internal;
  std::string message = "accepted";
};

Refusal refusal(const Problem& problem, const Recipe& recipe) {
  HostBackend backend;
  const ToyOp op;
  try {
    const Plan plan(backend, op, problem, recipe);
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  }
  return {};
}

bool says(const Refusal& refusal, ErrorKind kind, const std::string& words) {
  UNSCOPED_INFO("said: " << refusal.message);
  return refusal.kind == kind && refusal.message.find(words) != std::string::npos;
}

const Problem problem = ToyOp::problem(DType::f32, 5, 8, 12);
const Variant first{"toy_first", {{"block", 1}}};
const Variant second{"toy_second", {{"block", 2}}};
const Variant fused{"toy_fused", {{"block", 1}}};

}  // namespace

TEST_CASE("a plan runs its variants over the buffers and the workspace") {
  HostBackend backend;
  const ToyOp op;
  std::vector<std::vector<float>> results;
  for (const Recipe& recipe : {Recipe{first, second}, Recipe{fused}}) {
    const Plan plan(backend, op, problem, recipe);
    CHECK(plan.buffer_count() == 4);
    CHECK(plan.tensors().size() == 5);
    CHECK(plan.executables().size() == recipe.size());
    // hidden is 5 x 12 floats, which is 240 bytes; the fused variant has as much scratch again.
    CHECK(plan.workspace_bytes() == (recipe.size() == 2 ? 256 : 512));

    std::vector<std::vector<float>> tensors;
    for (std::size_t i = 0; i < plan.buffer_count(); ++i) {
      tensors.emplace_back(static_cast<std::size_t>(plan.tensors()[i].elements()));
      for (std::size_t j = 0; j < tensors[i].size(); ++j)
        tensors[i][j] = static_cast<float>((i * 7 + j * 5) % 11) - 5;
    }
    std::vector<void*> buffers;
    for (auto& tensor : tensors) buffers.push_back(tensor.data());
    const auto workspace = backend.allocate(plan.workspace_bytes());
    plan.run(buffers.data(), workspace->data(), nullptr);
    results.push_back(tensors[3]);

    // Small integers: exact in any order.
    for (std::size_t i = 0; i < 5; ++i)
      for (std::size_t j = 0; j < 8; ++j) {
        float sum = 0;
        for (std::size_t k = 0; k < 12; ++k)
          for (std::size_t l = 0; l < 8; ++l)
            sum += tensors[0][i * 8 + l] * tensors[1][k * 8 + l] * tensors[2][j * 12 + k];
        CHECK(tensors[3][i * 8 + j] == sum);
      }
  }
  CHECK(results[0] == results[1]);
}

TEST_CASE("a recipe must cover every stage once, in order") {
  const auto bad = ErrorKind::invalid_input;
  CHECK(says(refusal(problem, {first}), bad, "leaves out stage 'second'"));
  CHECK(says(refusal(problem, {}), bad, "leaves out stage 'first'"));
  CHECK(says(refusal(problem, {second, first}), bad, "does not cover the stages"));
  CHECK(says(refusal(problem, {first, second, second}), bad, "does not cover the stages"));
  CHECK(says(refusal(problem, {first, fused}), bad, "does not cover the stages"));
}

TEST_CASE("a variant that is illegal is refused with the reason") {
  const auto bad = ErrorKind::invalid_input;
  CHECK(says(refusal(problem, {{"no_such", {}}, second}), bad, "no family 'no_such'"));
  CHECK(says(refusal(problem, {{"toy_first", {{"block", 4}}}, second}), bad, "out of order"));
  CHECK(says(refusal(problem, {{"toy_first", {}}, second}), bad, "block"));
  CHECK(says(refusal(ToyOp::problem(DType::f32, 5, 6, 12), {first, second}), bad,
             "d must be a multiple of 4"));
}

TEST_CASE("tensors that no address reaches are refused with the bytes needed") {
  const std::int64_t most = (std::int64_t{1} << 31) - 1;
  const auto huge = ToyOp::problem(DType::f32, most, most - 3, most);
  CHECK(says(refusal(huge, {first, second}), ErrorKind::unavailable, "more than 2^62"));
}

TEST_CASE("a plan passes verification") {
  HostBackend backend;
  const ToyOp op;
  Verifier verifier(backend, op, problem, 9);
  const Plan plan(backend, op, problem, {first, second});
  const auto result = verifier.verify(0, 2, plan.executables());
  INFO(result.failure);
  CHECK(result.passed);
}
