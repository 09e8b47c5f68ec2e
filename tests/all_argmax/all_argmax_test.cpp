// A rank that plays its peers, on every family of a device. Ranks as processes are in the tests of
// the Python package.
#include "kernels/all_argmax/all_argmax.hpp"
#include "support/fuzz.hpp"
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

TEST_CASE("all-argmax: small random problems are right on the CPU") {
  check_registration(all_argmax_op());
  verify_small_on_cpu(all_argmax_op(), random_problem, 300);
}

TEST_CASE("all-argmax: every CUDA family has a space with its default in it, and legal launches") {
  check_cuda_spaces(all_argmax_op(), random_problem, 20);
}

TEST_CASE("all-argmax: a few small problems are right on the GPU", "[gpu]") {
  verify_small_on_gpu(all_argmax_op(), random_problem);
}
