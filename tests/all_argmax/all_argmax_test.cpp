// A rank that plays its peers, on every family of a device. Ranks as processes are in the tests of
// the Python package.
#include "kernels/all_argmax/all_argmax.hpp"
#include "support/fuzz_cases.hpp"
#include "support/op_reference.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem random_problem(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const auto [m, vocab] = draw.matrix(most_elements, 65536);
  return canonical(all_argmax_op(),
                   {"all-argmax",
                    "fwd",
                    DType::f32,
                    {{"m", std::min<std::int64_t>(m, 4096)},
                     {"vocab", vocab},
                     {"ranks", draw.of(std::vector<std::int64_t>{1, 2, 3, 8})}},
                    {}},
                   kind);
}

}  // namespace

const FuzzCases<all_argmax_op, random_problem,
                FuzzCounts{.small = 300, .larger = 0, .gpu = 0, .spaces = 20}>
    all_argmax_cases;
