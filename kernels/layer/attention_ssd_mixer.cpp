// Attention and state space duality side by side, as in Falcon-H1: both read the same normed input,
// and what they give is added to the residual, attention's first.
#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/layer/mixer.hpp"

namespace fftune::layer {
namespace {

constexpr const char* name_of_both = "attention-ssd";

/// Fields of attention whose tensors have the names of those of ssd, or that no such layer has.
bool is_of_attention_alone(const std::string& name) {
  return name == "output-gate" || name == "keys" || name == "query-scale";
}

void add_parts_of_both(PartList& parts, const MixerPlace& place) {
  attention_mixer().add_parts(parts, {place.x, "attention_sum", place.adds});
  ssd_mixer().add_parts(parts, {place.x, place.y, true, "attention_sum"});
}

std::vector<PartKind> part_kinds_of_both() {
  return {mixer_product_kind("ssm_out")};
}

std::string contradiction_of_both(const Problem& problem) {
  if (auto reason = attention_mixer().contradiction(problem); !reason.empty()) return reason;
  return ssd_mixer().contradiction(problem);
}

void set_draw_of_both(const Problem& problem, TensorSpec& tensor) {
  attention_mixer().set_draw(problem, tensor);
  ssd_mixer().set_draw(problem, tensor);
}

}  // namespace

bool has_both(const Problem& problem) {
  return problem.has("mixer", name_of_both);
}

const Mixer& attention_ssd_mixer() {
  static const Mixer mixer = [] {
    const Mixer &attention = attention_mixer(), &ssd = ssd_mixer();
    Mixer both{.name = name_of_both,
               .summary = "attention and ssd on the same input, as in Falcon-H1",
               .needed = {"heads", "dim", "cache", "ssm-heads", "ssm-dim", "state-dim",
                          "state-groups", "width"},
               .fields = ssd.fields,
               .shared_inputs = attention.shared_inputs,
               .inputs = {},
               .add_parts = add_parts_of_both,
               .part_kinds = part_kinds_of_both,
               .contradiction = contradiction_of_both,
               .contradiction_of_parts = attention.contradiction_of_parts,
               .set_draw = set_draw_of_both};
    std::remove_copy_if(attention.fields.begin(), attention.fields.end(),
                        std::back_inserter(both.fields), is_of_attention_alone);
    both.shared_inputs.insert(both.shared_inputs.end(), ssd.shared_inputs.begin(),
                              ssd.shared_inputs.end());
    // Weights, then caches and states, then what stands behind attention's caches.
    const auto find = [](const std::vector<const char*>& names, std::string_view name) {
      return std::find(names.begin(), names.end(), name);
    };
    const auto caches = find(attention.inputs, "k_cache"),
               behind = find(attention.inputs, "k_scale"), states = find(ssd.inputs, "conv_state");
    for (const auto& [first, last] : {std::pair{attention.inputs.begin(), caches},
                                      {ssd.inputs.begin(), states},
                                      {caches, behind},
                                      {states, ssd.inputs.end()},
                                      {behind, attention.inputs.end()}})
      both.inputs.insert(both.inputs.end(), first, last);
    return both;
  }();
  return mixer;
}

}  // namespace fftune::layer
