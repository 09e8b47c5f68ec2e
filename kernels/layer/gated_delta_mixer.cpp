// Linear attention by the gated delta rule, as in Qwen3.5 and OLMo-Hybrid: q, k and v pass a short
// convolution with SiLU, the rule reads and writes a state of each value head, and its output is
// normalised, with a gate behind the norm.
//
// q, k and v have products and convolutions of their own, whose weights may be rows of one. Their
// convolutions' states are parts of one [batch, channels, width], as transformers' caches have it.
#include <string>
#include <utility>
#include <vector>

#include "kernels/causal_conv1d/causal_conv1d.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/gated_delta_rule/gated_delta_rule.hpp"
#include "kernels/gated_rmsnorm/gated_rmsnorm.hpp"
#include "kernels/layer/mixer.hpp"
#include "kernels/linear/linear.hpp"

namespace fftune::layer {
namespace {

void add_gated_delta_parts(PartList& parts, const MixerPlace& place) {
  const Problem& problem = parts.problem();
  const std::int64_t heads = problem.size("heads"), dim = problem.size("dim"),
                     v_heads = size_or(problem, "v-heads", heads), v_dim = problem.size("v-dim"),
                     keys = heads * dim, values = v_heads * v_dim, width = problem.size("width"),
                     batch = problem.size("batch"), s = size_or(problem, "s", 1);
  const auto add_product = [&](const char* name, const char* y, const char* w, std::int64_t n) {
    add_mixer_product(parts, name, {{"k", problem.size("d")}, {"n", n}}, {{"bias", "no"}},
                      {{"x", place.x}, {"y", y}}, w, "");
  };
  const auto add_conv = [&](const char* name, const std::string& of, std::int64_t channels) {
    parts.add(name, causal_conv1d_op(),
              {{"s", s},
               {"b", batch},
               {"channels", channels},
               {"width", width},
               {"state-row", (2 * keys + values) * width}},
              {{"layout", "bsc"},
               {"act", "silu"},
               {"bias", "no"},
               {"state", "update"},
               {"state-order", "channels"}},
              {{"x", of + "_projected"},
               {"w", "w_conv_" + of},
               {"state", "conv_" + of + "_state"},
               {"y", of}});
  };
  add_product("in_q", "q_projected", "w_q", keys);
  add_product("in_k", "k_projected", "w_k", keys);
  add_product("in_v", "v_projected", "w_v", values);
  add_product("in_z", "output_gates", "w_z", values);
  add_product("in_b", "beta_logits", "w_b", v_heads);
  add_product("in_a", "decay_inputs", "w_a", v_heads);
  add_conv("conv_q", "q", keys);
  add_conv("conv_k", "k", keys);
  add_conv("conv_v", "v", values);
  PartList::Options rule{{"gate", "softplus"}, {"beta", "sigmoid"},    {"qk-norm", "l2"},
                         {"indices", "yes"},   {"state-layout", "kv"}, {"null-index", "-1"}};
  if (problem.options.contains("beta-scale")) rule["beta-scale"] = problem.option("beta-scale");
  parts.add("rule", gated_delta_rule_op(),
            {{"s", s},
             {"b", batch},
             {"heads", heads},
             {"v-heads", v_heads},
             {"dim", dim},
             {"v-dim", v_dim},
             {"states", batch}},
            std::move(rule), {{"a", "decay_inputs"}, {"out", "mixed"}});
  parts.add("gated_norm", gated_rmsnorm_op(), {{"m", parts.tokens() * v_heads}, {"d", v_dim}},
            {{"order", "after"},
             {"gate", "silu"},
             {"convention", "llama"},
             {"eps", option_or(problem, "mixer-eps", usual_eps)}},
            {{"x", "mixed"}, {"z", "output_gates"}, {"w", "mixer_norm"}, {"y", "gated"}});
  add_out_product(parts, place, "gated", values);
}

std::vector<PartKind> gated_delta_part_kinds() {
  std::vector<PartKind> kinds;
  for (const char* name : {"in_q", "in_k", "in_v", "in_z", "in_b", "in_a"})
    kinds.push_back(mixer_product_kind(name));
  for (const char* name : {"conv_q", "conv_k", "conv_v"})
    kinds.push_back({name, causal_conv1d_op, {stage_forward}});
  kinds.push_back({"rule", gated_delta_rule_op, {stage_forward}});
  kinds.push_back({"gated_norm", gated_rmsnorm_op, {stage_forward}});
  return kinds;
}

}  // namespace

const Mixer& gated_delta_mixer() {
  static const Mixer mixer{
      .name = "gated-delta-rule",
      .summary = "linear attention by the gated delta rule behind short convolutions",
      .needed = {"heads", "dim", "v-dim", "width"},
      .fields = {"v-heads", "beta-scale", "mixer-eps"},
      .shared_inputs = {"state_indices"},
      .inputs = {"w_q", "w_k", "w_v", "w_z", "w_b", "w_a", "w_conv_q", "w_conv_k", "w_conv_v",
                 "A_log", "dt_bias", "mixer_norm", "conv_q_state", "conv_k_state", "conv_v_state",
                 "states"},
      .add_parts = add_gated_delta_parts,
      .part_kinds = gated_delta_part_kinds};
  return mixer;
}

}  // namespace fftune::layer
