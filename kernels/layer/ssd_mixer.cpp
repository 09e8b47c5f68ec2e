// State space duality, as in the layers of Mamba-2: x, B and C pass a short convolution with SiLU,
// the core reads and writes a state of each head, and its output is normalised behind a gate.
//
// Gate, x, B, C and the steps have products of their own, and x, B and C convolutions, whose
// weights may be rows of one. The convolutions' states are parts of one [batch, channels, width],
// as transformers' caches have it.
#include <fmt/format.h>

#include <string>
#include <vector>

#include "kernels/causal_conv1d/causal_conv1d.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/gated_rmsnorm/gated_rmsnorm.hpp"
#include "kernels/layer/mixer.hpp"
#include "kernels/ssd/ssd.hpp"

namespace fftune::layer {
namespace {

void add_ssd_parts(PartList& parts, const MixerPlace& place) {
  const Problem& problem = parts.problem();
  const std::int64_t heads = problem.size("heads"), dim = problem.size("dim"),
                     groups = problem.size("state-groups"), state_dim = problem.size("state-dim"),
                     features = heads * dim, shared = groups * state_dim, d = problem.size("d"),
                     batch = problem.size("batch"), channels = features + 2 * shared;
  const std::string bias = option_or(problem, "conv-bias", "no");
  add_plain_product(parts, {"in_z", place.x, "w_z", "output_gates"}, d, features);
  add_plain_product(parts, {"in_x", place.x, "w_x", "mixer_x_projected"}, d, features);
  add_plain_product(parts, {"in_B", place.x, "w_B", "B_projected"}, d, shared);
  add_plain_product(parts, {"in_C", place.x, "w_C", "C_projected"}, d, shared);
  add_plain_product(parts, {"in_dt", place.x, "w_dt", "steps"}, d, heads);
  add_state_conv(parts,
                 {"conv_x", "mixer_x_projected", "w_conv_x", "b_conv_x", "conv_x_state", "mixer_x"},
                 features, channels, bias);
  add_state_conv(parts, {"conv_B", "B_projected", "w_conv_B", "b_conv_B", "conv_B_state", "B"},
                 shared, channels, bias);
  add_state_conv(parts, {"conv_C", "C_projected", "w_conv_C", "b_conv_C", "conv_C_state", "C"},
                 shared, channels, bias);
  parts.add("ssd", ssd_op(),
            {{"s", size_or(problem, "s", 1)},
             {"b", batch},
             {"heads", heads},
             {"dim", dim},
             {"state-dim", state_dim},
             {"groups", groups},
             {"states", batch}},
            {{"dt-bias", "yes"}, {"skip", "yes"}, {"indices", "yes"}, {"null-index", "-1"}},
            {{"x", "mixer_x"}, {"dt", "steps"}, {"out", "mixed"}});
  parts.add("gated_norm", gated_rmsnorm_op(),
            {{"m", parts.tokens()}, {"d", features / groups}, {"groups", groups}},
            {{"order", "before"},
             {"gate", "silu"},
             {"convention", "t5"},
             {"eps", option_or(problem, "mixer-eps", usual_eps)}},
            {{"x", "mixed"}, {"z", "output_gates"}, {"w", "mixer_norm"}, {"y", "gated"}});
  add_out_product(parts, place, "gated", features);
}

std::vector<PartKind> ssd_part_kinds() {
  std::vector<PartKind> kinds;
  for (const char* name : {"in_z", "in_x", "in_B", "in_C", "in_dt"})
    kinds.push_back(mixer_product_kind(name));
  for (const char* name : {"conv_x", "conv_B", "conv_C"})
    kinds.push_back({name, causal_conv1d_op, {stage_forward}});
  kinds.push_back({"ssd", ssd_op, {stage_forward}});
  kinds.push_back({"gated_norm", gated_rmsnorm_op, {stage_forward}});
  return kinds;
}

/// Steps are about those of their biases, as models begin with.
void set_ssd_draw(const Problem& problem, TensorSpec& tensor) {
  if (tensor.name == "w_dt") tensor.scale *= 0.25;
  for (const char* of : {"x", "B", "C"}) set_alike_draw(tensor, of, problem.size("width"));
}

std::string ssd_contradiction(const Problem& problem) {
  const std::int64_t heads = problem.size("heads"), groups = problem.size("state-groups");
  if (heads % groups != 0)
    return fmt::format("state-groups={} do not divide heads={}", groups, heads);
  if (problem.sizes.contains("ranks"))
    return fmt::format("mixer=ssd with ranks={}: a norm of a group needs its heads of other ranks",
                       problem.size("ranks"));
  return "";
}

}  // namespace

const Mixer& ssd_mixer() {
  static const Mixer mixer{
      .name = "ssd",
      .summary = "state space duality behind short convolutions, as in Mamba-2",
      .needed = {"heads", "dim", "state-dim", "state-groups", "width"},
      .fields = {"conv-bias", "mixer-eps"},
      .shared_inputs = {"state_indices"},
      .inputs = {"w_z", "w_x", "w_B", "w_C", "w_dt", "w_conv_x", "w_conv_B", "w_conv_C", "b_conv_x",
                 "b_conv_B", "b_conv_C", "A_log", "dt_bias", "D", "mixer_norm", "conv_x_state",
                 "conv_B_state", "conv_C_state", "states"},
      .add_parts = add_ssd_parts,
      .part_kinds = ssd_part_kinds,
      .contradiction = ssd_contradiction,
      .set_draw = set_ssd_draw};
  return mixer;
}

}  // namespace fftune::layer
