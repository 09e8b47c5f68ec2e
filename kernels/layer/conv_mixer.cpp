// A gated short convolution, as in LFM2: a product gives B, C and values of each token, and C times
// the causal convolution of B times the values goes through the output product.
#include <fmt/format.h>

#include <string>

#include "kernels/causal_conv1d/causal_conv1d.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/layer/mixer.hpp"
#include "kernels/linear/linear.hpp"

namespace fftune::layer {
namespace {

void add_conv_parts(PartList& parts, const MixerPlace& place) {
  const Problem& problem = parts.problem();
  const std::int64_t channels = problem.size("heads") * problem.size("dim");
  const std::string bias = option_or(problem, "conv-bias", "no");
  add_in_product(parts, place, 3 * channels, bias);
  PartList::Sizes sizes{{"s", size_or(problem, "s", 1)},
                        {"b", problem.size("batch")},
                        {"channels", channels},
                        {"width", problem.size("width")}};
  PartList::Names names{{"x", "projected"},
                        {"w", "w_conv"},
                        {"bias", "b_conv"},
                        {"state", "conv_state"},
                        {"y", "mixed"}};
  PartList::Options options{{"layout", "bsc"}, {"act", "none"}, {"bias", bias}, {"gates", "yes"}};
  add_conv_states(problem, channels, sizes, options, names);
  parts.add("conv", causal_conv1d_op(), std::move(sizes), std::move(options), std::move(names));
  add_out_product(parts, place, "mixed", channels);
}

std::vector<PartKind> conv_part_kinds() {
  return {mixer_product_kind("in"), {"conv", causal_conv1d_op, {stage_forward}}};
}

}  // namespace

const Mixer& conv_mixer() {
  static const Mixer mixer{
      .name = "conv",
      .summary = "a short convolution with gates in front of it and behind it, as in LFM2",
      .needed = {"heads", "dim", "width"},
      .fields = with_fields({"conv-bias"}, conv_state_fields()),
      .shared_inputs = {"state_indices"},
      .inputs = {"w_in", "w_in_scale", "w_in_zero", "b_in", "w_conv", "b_conv", "conv_state"},
      .add_parts = add_conv_parts,
      .part_kinds = conv_part_kinds};
  return mixer;
}

}  // namespace fftune::layer
