// A rank that plays its peers, against the float64 reference, on every family of a device.
#include "all_reduce/problems.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("all-reduce is in the catalog, and adds by hand") {
  check_registration(all_reduce_op());
  const Problem problem = all_reduce_problem(DeviceKind::cpu, DType::f32, 3, 1, 2,
                                             {{"norm", "t5"}, {"residual", "yes"}, {"eps", "0"}});
  const auto tensors = run_reference(all_reduce_op(), problem,
                                     {{"x", {1, 2}}, {"residual", {0, 1}}, {"w", {10, 1}}});
  CHECK(tensors.at("sum") == std::vector<double>{3, 7});
  CHECK(tensors.at("y")[0] == Approx(30 / std::sqrt(29.0)));
  CHECK(tensors.at("y")[1] == Approx(7 / std::sqrt(29.0)));
}

TEST_CASE("all-reduce: two thousand small random problems are right on the CPU") {
  verify_small_on_cpu(all_reduce_op(), random_all_reduce, 2000);
}

TEST_CASE("all-reduce: every CUDA family has a space with its default in it, and legal launches") {
  check_cuda_spaces(all_reduce_op(), random_all_reduce, 400);
}

TEST_CASE("all-reduce: 100 random problems are right on the GPU", "[gpu]") {
  verify_on_gpu(all_reduce_op(), random_all_reduce, 100);
}

TEST_CASE("all-reduce: a few small problems are right on the GPU", "[gpu][small]") {
  verify_small_on_gpu(all_reduce_op(), random_all_reduce);
}
