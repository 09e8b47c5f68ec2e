// A tensor in f32 that is updated by values which an earlier stage has rounded to bf16.
#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/host_backend.hpp"
#include "support/rows_op.hpp"
#include "verify/host_threads.hpp"
#include "verify/truth.hpp"
#include "verify/verifier.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Op of the test: k = x³ / 4 in bf16, and a state in f32 gains the outer product of k with itself.
class OuterProduct final : public RowsOp {
 public:
  OuterProduct() : RowsOp(DType::bf16) {}
  std::string_view name() const override { return "outer"; }
  std::string_view summary() const override { return "state += k kᵀ, k = x³ / 4"; }
  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const std::int64_t m = problem.size("m"), columns = width;
    return {{"x", DType::bf16, {m, columns}},
            {"k", DType::bf16, {m, columns}, Role::intermediate},
            {"state", DType::f32, {m, columns * columns}, Role::updated, 0.1}};
  }
  std::vector<StageSpec> stages(const Problem&) const override {
    return {{"cube", {"x"}, {"k"}, 1, 0, 0}, {"add", {"k", "state"}, {"state"}, 1, 0, 0}};
  }
  void reference(const Problem&, std::size_t stage, ReferenceTensors& tensors,
                 Parallel&) const override {
    if (stage == 0) {
      tensors["k"] = tensors.at("x");
      for (double& value : tensors.at("k")) value *= value * value / 4;
      return;
    }
    const auto& k = tensors.at("k");
    auto& state = tensors.at("state");
    for (std::size_t i = 0; i < state.size(); ++i) state[i] += k[one(i)] * k[other(i)];
  }

  /// The places in k whose product an element of the state gains.
  static std::size_t one(std::size_t i) { return i / width; }
  static std::size_t other(std::size_t i) { return i / (width * width) * width + i % width; }

  static constexpr std::size_t width = 48;
};

enum Tensor : std::size_t { x_tensor, k_tensor, state_tensor };
constexpr std::int64_t state_rows = 8;
constexpr std::size_t elements = state_rows * OuterProduct::width * OuterProduct::width;
const Problem outer_problem{"outer", "fwd", DType::bf16, {{"m", state_rows}}, {}};

/// The place of the largest element of the state.
std::size_t largest_of(const float* state) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < elements; ++i)
    if (std::abs(state[i]) > std::abs(state[found])) found = i;
  return found;
}

/// Runs both stages as they should be, then `spoil`.
std::shared_ptr<const Executable> both_stages(const std::function<void(float* state)>& spoil = {}) {
  return std::make_shared<HostExecutable>([=](void* const* t, void*) {
    constexpr std::size_t count = state_rows * OuterProduct::width;
    std::vector<float> k(count);
    decode(DType::bf16, static_cast<const std::byte*>(t[x_tensor]), std::span(k));
    for (float& value : k) value *= value * value / 4;
    auto* const bytes = static_cast<std::byte*>(t[k_tensor]);
    encode(DType::bf16, std::span<const float>(k), bytes);
    decode(DType::bf16, bytes, std::span(k));
    auto* const state = static_cast<float*>(t[state_tensor]);
    for (std::size_t i = 0; i < elements; ++i)
      state[i] += k[OuterProduct::one(i)] * k[OuterProduct::other(i)];
    if (spoil) spoil(state);
  });
}

Verification verify_outer(std::uint64_t seed, const std::function<void(float* state)>& spoil = {}) {
  HostBackend backend;
  const OuterProduct op;
  Verifier verifier(backend, op, outer_problem, seed);
  return verifier.verify(0, 2, {both_stages(spoil)});
}

}  // namespace

TEST_CASE("large elements of a state have the roundings of the factors of what it gains") {
  const OuterProduct op;
  HostThreads threads;
  int beyond = 0;  // of how many problems the rounded reference leaves the bound of all elements
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Truth truth(op, outer_problem, seed, threads);
    const Expected& expected = truth.expected(0, state_tensor);
    REQUIRE(expected.rounded.size() == expected.rows.size());
    double most = 0;
    for (std::size_t row = 0; row < expected.rows.size(); ++row)
      for (std::int64_t i = 0; i < truth.columns(state_tensor); ++i)
        most = std::max(most, std::abs(expected.rounded[row][i] - expected.rows[row][i]));
    beyond += most > 16 * expected.tolerance * expected.root_mean_square;
    CAPTURE(seed);
    const Verification right = verify_outer(seed);
    CAPTURE(right.failure);
    CHECK(right.passed);
  }
  CHECK(beyond > 0);
}

TEST_CASE("an element of such a state that is wrong is found, the largest too") {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    const auto says_one = [](const Verification& result) {
      return result.failure.find("state: 1 of") != std::string::npos;
    };
    for (const float change : {-0.1F, 0.1F})
      CHECK(says_one(verify_outer(seed, [=](float* state) { state[77] += change; })));
    for (const float factor : {0.97F, 1.03F})
      CHECK(
          says_one(verify_outer(seed, [=](float* state) { state[largest_of(state)] *= factor; })));
  }
}

TEST_CASE("a small error of such a state everywhere exceeds the norm's tolerance") {
  const Verification scaled = verify_outer(3, [](float* state) {
    for (std::size_t i = 0; i < elements; ++i) state[i] *= 1.01F;
  });
  CHECK_FALSE(scaled.passed);
}

TEST_CASE("only updates by what the run has rounded have more room") {
  const OuterProduct op;
  HostThreads threads;
  Truth truth(op, outer_problem, 1, threads);
  CHECK(truth.expected(1, state_tensor).rounded.empty());
  CHECK(truth.expected(0, k_tensor).rounded.empty());
}
