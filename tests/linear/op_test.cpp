#include "core/error.hpp"
#include "kernels/linear/linear.hpp"
#include "linear/problems.hpp"
#include "registry/catalog.hpp"
#include "support/error_of.hpp"
#include "support/op_reference.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem small_problem(const std::string& pass, Options options = {}) {
  return canonical(linear_op(), linear_problem(pass, {5, 16, 24}, DType::bf16, std::move(options)),
                   DeviceKind::cuda);
}

}  // namespace

TEST_CASE("linear is in the catalog, and every source that its families name is embedded") {
  check_registration(linear_op());
}

TEST_CASE("linear's buffers are in the order that the API promises, each option's at its end") {
  using Names = std::vector<std::string>;
  CHECK(tensor_names(small_problem("fwd")) == Names{"x", "w", "y"});
  CHECK(tensor_names(small_problem("fwd", {{"bias", "yes"}, {"residual", "yes"}})) ==
        Names{"x", "w", "bias", "residual", "y"});
  CHECK(tensor_names(small_problem("fwd", {{"y-scale", "yes"}, {"residual", "yes"}})) ==
        Names{"x", "w", "y_scale", "residual", "y"});
  CHECK(tensor_names(small_problem("bwd")) == Names{"dy", "x", "w", "dx", "dw"});
  CHECK(tensor_names(small_problem("bwd", {{"bias", "yes"}, {"accumulate", "yes"}})) ==
        Names{"dy", "x", "w", "dw_before", "dbias_before", "dx", "dw", "dbias"});
}

TEST_CASE("an option of the other pass is refused by name") {
  const auto complaint = [](const std::string& pass, const std::string& option) -> std::string {
    return error_of([&] { small_problem(pass, {{option, "yes"}}); });
  };
  CHECK(complaint("bwd", "residual") ==
        "linear: there is no option 'residual' in pass bwd: options are bias, accumulate");
  CHECK(complaint("fwd", "accumulate") ==
        "linear: there is no option 'accumulate' in pass fwd: options are bias, y-scale, residual, "
        "output, batch-invariant, weights, group, zeros, quantise");
  CHECK_FALSE(small_problem("fwd").options.contains("bias"));
}

TEST_CASE("linear's stages count their operations and bytes") {
  const auto forward = linear_op().stages(small_problem("fwd"));
  REQUIRE(forward.size() == 1);
  CHECK(forward[0].flops == 2.0 * 5 * 16 * 24);
  CHECK(forward[0].bytes == 2.0 * (5 * 16 + 24 * 16 + 5 * 24));
  const auto backward = linear_op().stages(small_problem("bwd", {{"bias", "yes"}}));
  REQUIRE(backward.size() == 3);
  CHECK(backward[0].reduction_length == 24);
  CHECK(backward[1].reduction_length == 5);
  CHECK(backward[1].bytes == 2.0 * (5 * 24 + 5 * 16 + 24 * 16));
  CHECK(backward[2].bytes == 2.0 * (5 * 24 + 24));
}
