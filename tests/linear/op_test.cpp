#include "core/error.hpp"
#include "kernels/linear/linear.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

Problem problem_of(const std::string& pass, std::map<std::string, std::string> options = {}) {
  return canonical(linear_op(),
                   {"linear", pass, DType::bf16, {{"m", 5}, {"k", 16}, {"n", 24}}, options},
                   DeviceKind::cuda);
}

std::vector<std::string> names_of(const Problem& problem) {
  std::vector<std::string> names;
  for (const auto& tensor : linear_op().tensors(problem)) names.push_back(tensor.name);
  return names;
}

}  // namespace

TEST_CASE("linear is in the catalog, and every source that its families name is embedded") {
  const auto& catalog = builtin_catalog();
  const Op& op = catalog.op("linear");
  for (const auto* family : op.families()) {
    REQUIRE(catalog.sources->hash(family->sources()).size() == 16);
    REQUIRE(&family_of(op, family->name()) == family);
  }
}

TEST_CASE("linear's buffers are in the order that the API promises, each option's at its end") {
  using Names = std::vector<std::string>;
  CHECK(names_of(problem_of("fwd")) == Names{"x", "w", "y"});
  CHECK(names_of(problem_of("fwd", {{"bias", "yes"}, {"residual", "yes"}})) ==
        Names{"x", "w", "bias", "residual", "y"});
  CHECK(names_of(problem_of("fwd", {{"y-scale", "yes"}, {"residual", "yes"}})) ==
        Names{"x", "w", "y_scale", "residual", "y"});
  CHECK(names_of(problem_of("bwd")) == Names{"dy", "x", "w", "dx", "dw"});
  CHECK(names_of(problem_of("bwd", {{"bias", "yes"}, {"accumulate", "yes"}})) ==
        Names{"dy", "x", "w", "dw_before", "dbias_before", "dx", "dw", "dbias"});
}

TEST_CASE("an option of the other pass is refused by name") {
  const auto complaint = [](const std::string& pass, const std::string& option) -> std::string {
    try {
      problem_of(pass, {{option, "yes"}});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  CHECK(complaint("bwd", "residual") ==
        "linear: there is no option 'residual' in pass bwd: options are bias, accumulate");
  CHECK(complaint("fwd", "accumulate") ==
        "linear: there is no option 'accumulate' in pass fwd: options are bias, y-scale, residual, "
        "output, batch-invariant, weights, group, zeros, quantise");
  CHECK_FALSE(problem_of("fwd").options.contains("bias"));
}

TEST_CASE("linear's stages count their operations and bytes") {
  const auto forward = linear_op().stages(problem_of("fwd"));
  REQUIRE(forward.size() == 1);
  CHECK(forward[0].flops == 2.0 * 5 * 16 * 24);
  CHECK(forward[0].bytes == 2.0 * (5 * 16 + 24 * 16 + 5 * 24));
  const auto backward = linear_op().stages(problem_of("bwd", {{"bias", "yes"}}));
  REQUIRE(backward.size() == 3);
  CHECK(backward[0].reduction_length == 24);
  CHECK(backward[1].reduction_length == 5);
  CHECK(backward[1].bytes == 2.0 * (5 * 24 + 5 * 16 + 24 * 16));
  CHECK(backward[2].bytes == 2.0 * (5 * 24 + 24));
}
