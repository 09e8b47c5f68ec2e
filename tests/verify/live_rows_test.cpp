// Outputs whose last rows are nobody's: what is in them is neither asked for nor looked at.
#include <cstring>
#include <span>

#include "support/catch.hpp"
#include "verify/toy_run.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

constexpr std::int64_t rows = 40, columns = 16, live = 25;

/// The toy of whose output `live` rows have values.
class SortedToy : public ToyOp {
 public:
  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    auto tensors = ToyOp::tensors(problem);
    tensors[toy_y].live_rows = "ends";
    tensors.push_back({"ends", DType::i32, {2}, Role::input});
    tensors.back().draw = [](std::uint64_t, std::span<double> ends) {
      ends[0] = 3, ends[1] = live;
    };
    return tensors;
  }
};

/// Verifies the second stage, whose y is spoilt from an element on, by another value in each run.
Verification spoilt_from(std::int64_t element) {
  HostBackend backend;
  const SortedToy op;
  const Problem problem = SortedToy::problem(DType::f32, rows, columns, 16);
  unsigned char byte = 0xff;
  const auto stage = toy_stage(problem, 1, [&](void* const* tensors, void*) {
    std::memset(static_cast<float*>(tensors[toy_y]) + element, byte--,
                static_cast<std::size_t>(rows * columns - element) * sizeof(float));
  });
  return Verifier(backend, op, problem, 1).verify(1, 1, {stage});
}

}  // namespace

TEST_CASE("rows behind the live ones may be left unwritten, and no other") {
  const Verification whole = spoilt_from(rows * columns), sorted = spoilt_from(live * columns);
  INFO(sorted.failure);
  CHECK(whole.passed);
  CHECK(sorted.passed);
  CHECK(sorted.bits == whole.bits);
  CHECK(sorted.error == whole.error);
  const Verification short_of_one = spoilt_from(live * columns - 1);
  CHECK(short_of_one.failure.find("y: 1 of 640 elements were not written, the first at [24, 15]") !=
        std::string::npos);
}
