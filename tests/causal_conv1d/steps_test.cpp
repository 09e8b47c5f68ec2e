// Steps of one token of each sequence, which have a kernel of their own.
#include <random>
#include <vector>

#include "causal_conv1d/problems.hpp"
#include "support/catch.hpp"
#include "support/fields.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

std::vector<Problem> steps() {
  const std::pair<Sizes, Options> forms[] = {
      {{{"slots", 9}}, {{"act", "silu"}, {"first-slot", "1"}}},
      {{{"slots", 9}, {"entries", 8}}, {{"bias", "yes"}, {"has-state", "yes"}}},
      {{}, {{"gates", "yes"}, {"state-order", "channels"}}},
      {{{"slots", 12}, {"state-row", 4000}}, {{"state-order", "channels"}, {"weights", "f32"}}},
      {{{"x-row", 1000}}, {{"state", "pass"}, {"act", "silu"}, {"bias", "yes"}}}};
  std::vector<Problem> problems;
  std::int64_t number = 0;
  for (const auto& [more, options] : forms)
    for (const std::int64_t channels : {24, 150, 7}) {
      Sizes sizes{{"s", 1}, {"b", 1 + 3 * (number % 3)}, {"channels", channels}};
      sizes["width"] = std::vector<std::int64_t>{4, 2, 8, 3}[static_cast<std::size_t>(number % 4)];
      sizes.insert(more.begin(), more.end());
      Options chosen{{"state", "update"}};
      for (const auto& [name, value] : options) chosen[name] = value;
      problems.push_back(conv_problem(DeviceKind::cuda, "fwd",
                                      number++ % 2 == 0 ? DType::bf16 : DType::f32, sizes, chosen));
    }
  return problems;
}

}  // namespace

TEST_CASE("steps of one token of each sequence are right on the GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(1);
  verify_families(*backend, causal_conv1d_op(), steps(), random, 3);
}
