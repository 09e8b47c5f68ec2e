// State space duality, as in the layers of Mamba-2: x, B and C pass a short convolution with SiLU,
// the core reads and writes a state of each head, and its output is normalised behind a gate.
//
// Gate, x, B, C and the steps are columns of one product, in this order, and x, B and C those of
// one convolution: their readers take them from wider rows.
#include <fmt/format.h>

#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/causal_conv1d/causal_conv1d.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/gated_rmsnorm/gated_rmsnorm.hpp"
#include "kernels/layer/mixer.hpp"
#include "kernels/ssd/ssd.hpp"
#include "registry/part_family.hpp"

namespace fftune::layer {
namespace {

constexpr StateConv conv{"conv", "projected", "w_conv", "b_conv", "conv_state", "convolved"};

/// The size of its heads, which attention beside it has too.
std::int64_t own_size(const Problem& problem, const std::string& name) {
  return problem.size(has_both(problem) ? "ssm-" + name : name);
}

/// Where the columns of the product and of the convolution are.
struct Place {
  std::int64_t features, shared, heads;

  explicit Place(const Problem& problem)
      : features(own_size(problem, "heads") * own_size(problem, "dim")),
        shared(problem.size("state-groups") * problem.size("state-dim")),
        heads(own_size(problem, "heads")) {}

  std::int64_t channels() const { return features + 2 * shared; }
  std::int64_t columns() const { return features + channels() + heads; }
  Columns of_conv() const { return {features, columns()}; }
  Columns B() const { return {features, channels()}; }
  Columns C() const { return {features + shared, channels()}; }
};

void add_ssd_parts(PartList& parts, const MixerPlace& place) {
  const Problem& problem = parts.problem();
  const Place at(problem);
  const std::int64_t heads = own_size(problem, "heads"), dim = own_size(problem, "dim"),
                     groups = problem.size("state-groups"), state_dim = problem.size("state-dim"),
                     batch = problem.size("batch");
  add_in_product(parts, place, at.columns(), "no");
  add_state_conv(parts, conv, at.channels(), at.channels(), option_or(problem, "conv-bias", "no"),
                 at.of_conv());
  PartList::Options options{{"dt-bias", "yes"}, {"skip", "yes"}};
  for (const char* name : {"dt-min", "dt-max"})
    if (problem.options.contains(name)) options[name] = problem.option(name);
  PartList::Sizes sizes{{"s", size_or(problem, "s", 1)},
                        {"b", batch},
                        {"heads", heads},
                        {"dim", dim},
                        {"state-dim", state_dim},
                        {"groups", groups},
                        {"x-row", at.channels()},
                        {"b-row", at.channels()},
                        {"c-row", at.channels()},
                        {"dt-row", at.columns()}};
  add_head_states(problem, sizes, options);
  OpPart& core = parts.add("ssd", ssd_op(), std::move(sizes), std::move(options),
                           {{"x", "convolved"},
                            {"B", "convolved"},
                            {"C", "convolved"},
                            {"dt", "projected"},
                            {"out", "mixed"}});
  set_first(core, "B", at.B().first);
  set_first(core, "C", at.C().first);
  set_first(core, "dt", at.features + at.channels());
  PartList::Options of_norm{{"order", "before"}, {"gate", "silu"}, {"convention", "t5"}};
  if (problem.has("mixer-norm", "none"))
    of_norm = {{"norm", "none"}, {"gate", "silu"}};
  else
    of_norm["eps"] = option_or(problem, "mixer-eps", usual_eps);
  parts.add("gated_norm", gated_rmsnorm_op(),
            {{"m", parts.tokens()},
             {"d", at.features / groups},
             {"groups", groups},
             {"z-row", at.columns()}},
            std::move(of_norm),
            {{"x", "mixed"}, {"z", "projected"}, {"w", "mixer_norm"}, {"y", "gated"}});
  add_out_product(
      parts, place, "gated", at.features,
      has_both(problem) ? OutProduct{"ssm_out", "w_ssm_out", "", "ssm_scale"} : OutProduct{});
}

std::vector<PartKind> ssd_part_kinds() {
  return {mixer_product_kind("in"),
          {"conv", causal_conv1d_op, {stage_forward}},
          {"ssd", ssd_op, {stage_forward}},
          {"gated_norm", gated_rmsnorm_op, {stage_forward}}};
}

/// Steps are about those of their biases, as models begin with.
void set_ssd_draw(const Problem& problem, TensorSpec& tensor) {
  set_alike_draw(tensor, conv, problem.size("width"));
  if (tensor.name != "w_in" || tensor.dtype != problem.dtype) return;
  tensor.draw = [scale = tensor.scale, steps = own_size(problem, "heads") * problem.size("d")](
                    std::uint64_t seed, std::span<double> values) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal(0, scale);
    for (double& value : values) value = normal(random);
    for (double& value : values.last(static_cast<std::size_t>(steps))) value *= 0.25;
  };
}

std::string ssd_contradiction(const Problem& problem) {
  const std::int64_t heads = own_size(problem, "heads"), groups = problem.size("state-groups");
  if (heads % groups != 0)
    return fmt::format("state-groups={} do not divide {}={}", groups,
                       has_both(problem) ? "ssm-heads" : "heads", heads);
  if (problem.has("mixer-norm", "none") && problem.options.contains("mixer-eps"))
    return fmt::format("mixer-eps={} with mixer-norm=none: it is of a norm",
                       problem.option("mixer-eps"));
  const Place at(problem);
  for (const auto& [name, columns] : {std::pair{"x", at.of_conv()}, {"B", at.B()}, {"C", at.C()}})
    if (auto reason = contradiction_of_columns(problem, name, columns); !reason.empty())
      return reason;
  if (problem.sizes.contains("ranks"))
    return fmt::format("mixer={} with ranks={}: a norm of a group needs its heads of other ranks",
                       problem.option("mixer"), problem.size("ranks"));
  return "";
}

}  // namespace

const Mixer& ssd_mixer() {
  static const Mixer mixer{
      .name = "ssd",
      .summary = "state space duality behind short convolutions, as in Mamba-2",
      .needed = {"heads", "dim", "state-dim", "state-groups", "width"},
      .fields =
          with_fields({"conv-bias", "mixer-eps", "mixer-norm", "dt-min", "dt-max", "in-scale"},
                      head_state_fields()),
      .shared_inputs = {"state_indices"},
      .inputs = {"w_in", "w_in_scale", "w_in_zero", "in_scale", "w_conv", "b_conv", "A_log",
                 "dt_bias", "D", "mixer_norm", "conv_state", "states"},
      .add_parts = add_ssd_parts,
      .part_kinds = ssd_part_kinds,
      .contradiction = ssd_contradiction,
      .set_draw = set_ssd_draw};
  return mixer;
}

}  // namespace fftune::layer
