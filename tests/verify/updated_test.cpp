// Tensors that are updated in place, drawn as a whole, of integers, or meant to be infinite.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>

#include "support/catch.hpp"
#include "support/host_backend.hpp"
#include "support/rows_op.hpp"
#include "verify/host_threads.hpp"
#include "verify/verifier.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Op of the test: values below the row's threshold, an integer, become -inf, and the others twice
/// what they were, in place; below counts the former. Rows are alike, or their place is added to
/// the threshold.
class Cut final : public RowsOp {
 public:
  explicit Cut(bool alike = true) : RowsOp(DType::f32, alike) {}
  std::string_view name() const override { return "cut"; }
  std::string_view summary() const override {
    return "values below a threshold become -inf, others double";
  }
  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const auto m = problem.size("m");
    TensorSpec thresholds{"thresholds", DType::i64, {m}};
    thresholds.draw = [](std::uint64_t, std::span<double> values) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i % 3) - 1;
    };
    return {thresholds,
            {"x", problem.dtype, {m, width}, Role::updated, 1},
            {"below", DType::i32, {m}, Role::output, 1}};
  }
  std::vector<StageSpec> stages(const Problem&) const override {
    return {{"cut", {"thresholds", "x"}, {"x", "below"}, 1, 0, 0}};
  }
  void reference(const Problem& problem, std::size_t, ReferenceTensors& tensors,
                 Parallel&) const override {
    auto& x = tensors.at("x");
    auto& below = tensors["below"];
    below.assign(static_cast<std::size_t>(problem.size("m")), 0);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t row = i / width;
      const double place = alike_ ? 0 : 0.001 * static_cast<double>(row);
      if (x[i] >= tensors.at("thresholds")[row] + place) {
        x[i] *= 2;
        continue;
      }
      x[i] = -std::numeric_limits<double>::infinity();
      ++below[row];
    }
  }

  static constexpr std::size_t width = 40;
};

/// Runs the op on the tensors as they are, then `spoil`.
std::shared_ptr<const Executable> cut(
    std::int64_t m, bool alike, const std::function<void(float*, std::int32_t*)>& spoil = {}) {
  return std::make_shared<HostExecutable>([=](void* const* t, void*) {
    const auto* thresholds = static_cast<const std::int64_t*>(t[0]);
    auto* x = static_cast<float*>(t[1]);
    auto* below = static_cast<std::int32_t*>(t[2]);
    for (std::int64_t row = 0; row < m; ++row) {
      below[row] = 0;
      const double place = alike ? 0 : 0.001 * static_cast<double>(row);
      for (std::size_t i = 0; i < Cut::width; ++i) {
        float& value = x[static_cast<std::size_t>(row) * Cut::width + i];
        if (value >= static_cast<double>(thresholds[row]) + place) {
          value *= 2;
          continue;
        }
        value = -std::numeric_limits<float>::infinity();
        ++below[row];
      }
    }
    if (spoil) spoil(x, below);
  });
}

std::string failure(std::int64_t m, bool alike,
                    const std::function<void(float*, std::int32_t*)>& spoil = {}) {
  HostBackend backend;
  const Cut op(alike);
  Verifier verifier(backend, op, {"cut", "fwd", DType::f32, {{"m", m}}, {}}, 5);
  const auto first = verifier.verify(0, 1, {cut(m, alike, spoil)});
  // Again, because what was updated must be provided anew.
  const auto second = verifier.verify(0, 1, {cut(m, alike)});
  CHECK(second.passed);
  return first.failure;
}

/// Op of the test: the last row of the cache becomes a third of the values.
class Append final : public RowsOp {
 public:
  Append() : RowsOp(DType::f32, false) {}
  std::string_view name() const override { return "append"; }
  std::string_view summary() const override { return "a third of the values goes into a cache"; }
  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return {{"values", problem.dtype, {width}},
            {"cache", problem.dtype, {problem.size("m"), width}, Role::updated, 1}};
  }
  std::vector<StageSpec> stages(const Problem&) const override {
    return {{"append", {"values", "cache"}, {"cache"}, 1, 0, 0}};
  }
  void reference(const Problem&, std::size_t, ReferenceTensors& tensors, Parallel&) const override {
    auto& cache = tensors.at("cache");
    for (std::size_t i = 0; i < width; ++i)
      cache[cache.size() - width + i] = tensors.at("values")[i] / 3;
  }

  static constexpr std::size_t width = 64;
};

/// Verifies a run whose written values are wrong by a factor.
Verification append(std::int64_t m, float factor) {
  HostBackend backend;
  const Append op;
  Verifier verifier(backend, op, {"append", "fwd", DType::f32, {{"m", m}}, {}}, 5);
  return verifier.verify(0, 1, {std::make_shared<HostExecutable>([=](void* const* t, void*) {
                           const auto* values = static_cast<const float*>(t[0]);
                           auto* last = static_cast<float*>(t[1]) +
                                        static_cast<std::size_t>(m - 1) * Append::width;
                           for (std::size_t i = 0; i < Append::width; ++i)
                             last[i] = values[i] / 3 * factor;
                         })});
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("tensors updated in place pass, with infinities and counts") {
  for (const std::int64_t m : {1, 61, 62, 200}) CHECK(failure(m, true) == "");
}

TEST_CASE("rows whose place counts are all distinct") {
  CHECK(failure(200, false) == "");
  HostBackend backend;
  const Cut op(false);
  Verifier verifier(backend, op, {"cut", "fwd", DType::f32, {{"m", 20}}, {}}, 5);
  verifier.retoken(150);
  CHECK(verifier.verify(0, 1, {cut(150, false)}).passed);
}

TEST_CASE("a wrong infinity, one that is missing, and a wrong count are found") {
  const auto infinity = std::numeric_limits<float>::infinity();
  CHECK(contains(failure(70, true,
                         [&](float* x, std::int32_t*) {
                           *std::find_if(x, x + 40, [](float value) {
                             return std::isfinite(value);
                           }) = -infinity;
                         }),
                 "x: 1 of 2800 elements are wrong"));
  CHECK(contains(
      failure(70, true,
              [&](float* x, std::int32_t*) { *std::find(x, x + 2800, -infinity) = -1.0f; }),
      "x: 1 of 2800 elements are wrong"));
  CHECK(contains(
      failure(70, true, [&](float* x, std::int32_t*) { *std::find(x, x + 2800, -infinity) *= -1; }),
      "x: 1 of 2800 elements are wrong"));
  CHECK(contains(failure(70, true, [](float*, std::int32_t* below) { ++below[69]; }),
                 "below: 1 of 70 elements are wrong"));
}

TEST_CASE("the error of one row that is written does not vanish among thousands that stay") {
  const Verification alone = append(1, 1);
  CHECK(alone.passed);
  const Verification among = append(4096, 1);
  CHECK(among.passed);
  CHECK(among.tolerance == Approx(alone.tolerance));
  CHECK(contains(append(4096, 1.00001F).failure, "relative error 1.0"));
}
