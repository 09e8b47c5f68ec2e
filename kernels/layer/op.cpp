// layer: its fields, and what follows from its parts: tensors, stages, families, the definition.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "device/group_layout.hpp"
#include "kernels/causal_conv1d/causal_conv1d.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/cache_format.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/part_stages.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "kernels/gemm/quantise/quantise.hpp"
#include "kernels/layer/fields.hpp"
#include "kernels/layer/layer.hpp"
#include "kernels/layer/mixer.hpp"
#include "kernels/mla/mla.hpp"
#include "kernels/moe/moe.hpp"
#include "kernels/moe_route/moe_route.hpp"
#include "kernels/rope/rope.hpp"
#include "kernels/ssd/ssd.hpp"
#include "registry/last_problems.hpp"
#include "registry/part_family.hpp"

namespace fftune::layer {
namespace {

/// Inputs that all layers of a plan share; those of mixers are behind the first.
constexpr const char* shared_inputs[] = {"x", "group", "first_expert"};

/// The tensors of a layer of its own, in the order of the buffers: in front of the mixer's and
/// behind them.
constexpr const char* inputs_before_mixer[] = {"attn_norm", "attn_norm_bias"};
constexpr const char* inputs_behind_mixer[] = {
    "residual_scale", "w_o",          "w_o_scale",       "w_o_zero",         "b_o",
    "attn_post_norm", "ffn_norm",     "ffn_norm_bias",   "w_router",         "b_router",
    "choice_bias",    "expert_scale", "router_norm",     "experts_norm",     "w_gate",
    "w_up",           "w_gate_up",    "w_down",          "w_gate_scale",     "w_gate_zero",
    "w_up_scale",     "w_up_zero",    "w_gate_up_scale", "w_down_scale",     "w_down_zero",
    "b_gate",         "b_up",         "b_gate_up",       "b_down",           "w_shared_router",
    "w_shared_gate",  "w_shared_up",  "w_shared_down",   "shared_post_norm", "experts_post_norm",
    "ffn_post_norm",  "w_input_gate", "out_scale",       "ssm_scale",        "gate_scale",
    "ffn_scale",      "w_ssm_out",    "w_ssm_out_scale", "w_ssm_out_zero",   "layer_input",
    "w_input_out",    "input_norm",   "layer_scalar"};

/// All inputs that there may be: those that layers share, and then those of a layer.
struct InputOrder {
  std::vector<std::string> names;
  std::size_t shared = 0;

  InputOrder() {
    names.emplace_back(shared_inputs[0]);
    add_of_mixers(&Mixer::shared_inputs);
    names.insert(names.end(), std::begin(shared_inputs) + 1, std::end(shared_inputs));
    shared = names.size();
    names.insert(names.end(), std::begin(inputs_before_mixer), std::end(inputs_before_mixer));
    add_of_mixers(&Mixer::inputs);
    names.insert(names.end(), std::begin(inputs_behind_mixer), std::end(inputs_behind_mixer));
  }

  std::ptrdiff_t place(const std::string& name) const {
    return std::find(names.begin(), names.end(), name) - names.begin();
  }

 private:
  /// A mixer's tensors keep their order: new ones stand in front of those that others have too. The
  /// mixer that has those of two others begins, for these say nothing of each other.
  void add_of_mixers(std::vector<const char*> Mixer::*inputs) {
    std::vector<const Mixer*> all{&attention_ssd_mixer()};
    all.insert(all.end(), mixers().begin(), mixers().end());
    for (const Mixer* mixer : all) {
      const auto& own = mixer->*inputs;
      std::ptrdiff_t next = std::ssize(names);
      for (auto name = own.rbegin(); name != own.rend(); ++name)
        if (const auto known = place(*name); known < std::ssize(names))
          next = known;
        else
          names.insert(names.begin() + next, *name);
    }
  }
};

const InputOrder& input_order() {
  static const InputOrder order;
  return order;
}

/// Where the tensor stands among the inputs.
std::ptrdiff_t rank_of(const std::string& name) {
  return input_order().place(name);
}

Problem one_layer(const Problem& problem) {
  Problem one = problem;
  one.sizes.erase("layers");
  return one;
}

/// Test data of inputs that are no noise, and of what the router chooses by.
void set_draw(const Problem& problem, TensorSpec& tensor) {
  if (const Mixer& mixer = mixer_of(problem); mixer.set_draw != nullptr)
    mixer.set_draw(problem, tensor);
  set_index_draw(problem, tensor);
  if (has_experts(problem)) set_routed_draw(problem, tensor);
}

/// Those of the parts, each once: what one part writes for another is an intermediate.
std::vector<TensorSpec> tensors_of_one(const Problem& problem) {
  std::vector<TensorSpec> inputs, outputs, intermediates;
  for (const OpPart& part : parts_of(problem))
    for (TensorSpec tensor : part.op->tensors(part.problem)) {
      tensor.name = part.tensor(tensor.name);
      TensorSpec* known = nullptr;
      for (auto* tensors : {&inputs, &outputs, &intermediates})
        if (const auto place = find_tensor(*tensors, tensor.name)) known = &(*tensors)[*place];
      // Which ids a part expects, the part that writes them does not know. The last one that reads
      // them, the experts, expects more of them than a table of their factors does.
      if (known && tensor.draw && known->role == Role::intermediate) known->draw = tensor.draw;
      if (known) continue;
      if (tensor.role == Role::output && tensor.name != "y") tensor.role = Role::intermediate;
      set_draw(problem, tensor);
      (tensor.role == Role::output         ? outputs
       : tensor.role == Role::intermediate ? intermediates
                                           : inputs)
          .push_back(std::move(tensor));
    }
  std::stable_sort(inputs.begin(), inputs.end(), [](const TensorSpec& a, const TensorSpec& b) {
    return rank_of(a.name) < rank_of(b.name);
  });
  inputs.insert(inputs.end(), std::make_move_iterator(outputs.begin()),
                std::make_move_iterator(outputs.end()));
  inputs.insert(inputs.end(), std::make_move_iterator(intermediates.begin()),
                std::make_move_iterator(intermediates.end()));
  return inputs;
}

/// The name of a tensor of layer `at` of `layers` among those of all layers.
std::string name_in_all(const std::string& name, std::int64_t at, std::int64_t layers) {
  if (name == "x" && at > 0) return fmt::format("layers.{}.y", at - 1);
  if (is_shared(name) || (name == "y" && at == layers - 1)) return name;
  return fmt::format("layers.{}.{}", at, name);
}

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  if (!problem.sizes.contains("layers")) return tensors_of_one(problem);
  const auto one = layer_op().tensors(one_layer(problem));
  const std::int64_t layers = problem.size("layers");
  std::vector<TensorSpec> inputs, intermediates;
  for (const TensorSpec& tensor : one)
    if (is_shared(tensor.name)) inputs.push_back(tensor);
  TensorSpec y;
  for (std::int64_t at = 0; at < layers; ++at)
    for (TensorSpec tensor : one) {
      if (is_shared(tensor.name)) continue;
      tensor.name = name_in_all(tensor.name, at, layers);
      if (tensor.name == "y") {
        y = std::move(tensor);
        continue;
      }
      if (tensor.role == Role::output) tensor.role = Role::intermediate;
      (tensor.role == Role::intermediate ? intermediates : inputs).push_back(std::move(tensor));
    }
  inputs.push_back(std::move(y));
  inputs.insert(inputs.end(), std::make_move_iterator(intermediates.begin()),
                std::make_move_iterator(intermediates.end()));
  return inputs;
}

/// Fields that belong to ffn=moe alone, or are missing there.
std::string contradiction_of_experts(const Problem& problem) {
  if (has_experts(problem)) {
    for (const char* name : {"experts", "top-k"})
      if (!problem.sizes.contains(name))
        return fmt::format("ffn=moe without {}: give the number", name);
    if (problem.sizes.contains("own-experts") && !problem.sizes.contains("ranks"))
      return fmt::format("own-experts={} without ranks: a rank of a group has a slice",
                         problem.size("own-experts"));
    if (problem.has("shared-gate", "yes") && !problem.sizes.contains("shared-h"))
      return "shared-gate=yes without shared-h: give the network's intermediate size";
    if (!problem.has("expert-norms", "yes")) return "";
    if (!problem.sizes.contains("shared-h"))
      return "expert-norms=yes without shared-h: they are of experts beside another network";
    if (!problem.has("post-norms", "yes"))
      return "expert-norms=yes without post-norms=yes: their sum is normalised too";
    if (problem.has("shared-gate", "yes"))
      return "expert-norms=yes with shared-gate=yes: that network has a norm, and no gate";
    if (problem.sizes.contains("ranks"))
      return fmt::format("expert-norms=yes with ranks={}: norms need the sums over the ranks",
                         problem.size("ranks"));
    return "";
  }
  for (const char* name :
       {"experts", "top-k", "shared", "own-experts", "shared-h", "groups", "top-groups"})
    if (problem.sizes.contains(name))
      return fmt::format("{}={} is of ffn=moe", name, problem.size(name));
  for (const char* name : {"score", "order", "renormalise", "sum-eps", "routing", "gate-up",
                           "group-score", "choice-bias", "router-bias", "route-scale",
                           "shared-gate", "logits", "expert-norms", "expert-scale"})
    if (problem.options.contains(name))
      return fmt::format("{}={} is of ffn=moe", name, problem.option(name));
  return "";
}

/// Whether the part may have the stages that the family covers: it does not compute another pass.
bool has_stages(const PartKind& kind, const Family& family) {
  const auto own = family.stages();
  return std::all_of(own.begin(), own.end(), [&](const std::string& stage) {
    return std::find(kind.stages.begin(), kind.stages.end(), stage) != kind.stages.end();
  });
}

/// Fields that a layer without a mixer, or without a network, has not.
std::string contradiction_of_halves(const Problem& problem) {
  const bool mixes = &mixer_of(problem) != &no_mixer();
  if (mixes && has_network(problem)) return "";
  if (!mixes && !has_network(problem))
    return "mixer=none with ffn=none: a layer has at least one of them";
  const char* const lacks = mixes ? "ffn=none" : "mixer=none";
  if (problem.sizes.contains("ranks"))
    return fmt::format("{} with ranks={}: ranks have slices of layers with both halves", lacks,
                       problem.size("ranks"));
  if (problem.sizes.contains("input-h"))
    return fmt::format("{} with input-h={}: layers with both halves have inputs", lacks,
                       problem.size("input-h"));
  if (problem.options.contains("block"))
    return fmt::format("{} with block={}: there is one half alone", lacks, problem.option("block"));
  if (!mixes) {
    for (const char* name : {"out-bias", "attn-weights", "expert-norms"})
      if (problem.options.contains(name))
        return fmt::format("{}={} is of layers with a mixer", name, problem.option(name));
    return "";
  }
  if (problem.sizes.contains("h"))
    return fmt::format("h={} is of layers with a feed-forward network", problem.size("h"));
  if (problem.options.contains("ffn-bias"))
    return fmt::format("ffn-bias={} is of layers with a feed-forward network",
                       problem.option("ffn-bias"));
  if (!problem.has("act", "silu"))
    return fmt::format("act={} is of layers with a feed-forward network", problem.option("act"));
  return "";
}

/// relu(x)² is of networks without gates, by the kernels of those with gates.
std::string contradiction_of_squares(const Problem& problem) {
  if (!problem.has("act", "relu2")) return "";
  if (!has_experts(problem) && !problem.has("ffn", "plain"))
    return "act=relu2 with a gate: it is of ffn=plain and moe";
  for (const char* name : {"ffn-bias", "gate-up", "shared-gate", "weights", "quantise"})
    if (problem.options.contains(name))
      return fmt::format("act=relu2 with {}={}: there is no kernel for it", name,
                         problem.option(name));
  return "";
}

/// Factors of gates are of one network, by linear and act-mul.
std::string contradiction_of_gate_scale(const Problem& problem) {
  if (!problem.has("gate-scale", "yes")) return "";
  for (const char* name : {"ffn", "ffn-bias", "weights", "quantise"})
    if (problem.options.contains(name))
      return fmt::format("gate-scale=yes with {}={}: it is of dense networks with a gate", name,
                         problem.option(name));
  if (problem.sizes.contains("ranks"))
    return fmt::format("gate-scale=yes with ranks={}: there is no kernel for it",
                       problem.size("ranks"));
  return "";
}

class LayerOp final : public DescribedOp {
 public:
  LayerOp() : DescribedOp(facts()) {}

  std::string contradiction(const Problem& problem) const override {
    if (auto reason = contradiction_of_mixer(problem); !reason.empty()) return reason;
    for (const auto contradiction :
         {contradiction_of_halves, contradiction_of_squares, contradiction_of_gate_scale})
      if (auto reason = contradiction(problem); !reason.empty()) return reason;
    if (problem.options.contains("link") && !problem.sizes.contains("ranks"))
      return "link=" + problem.option("link") + " without ranks: give the ranks of the group";
    const bool layer_norm = problem.has("norm", "layer");
    if (layer_norm && problem.options.contains("convention"))
      return "convention=" + problem.option("convention") + " is of norm=rms";
    const bool scales = problem.options.contains("residual-scale");
    if (scales && problem.options.contains("post-norms"))
      return fmt::format("residual-scale={} with post-norms={}: a norm takes a factor away again",
                         problem.option("residual-scale"), problem.option("post-norms"));
    if (scales && problem.has("shared-gate", "yes"))
      return fmt::format("residual-scale={} with shared-gate=yes: that network has no factor",
                         problem.option("residual-scale"));
    const bool post_norms = problem.options.contains("post-norms");
    if (layer_norm && post_norms)
      return fmt::format(
          "post-norms={} is of norm=rms: there is no layer normalisation with a residual behind it",
          problem.option("post-norms"));
    if (auto reason = contradiction_of_experts(problem); !reason.empty()) return reason;
    if (problem.options.contains("block") && post_norms)
      return fmt::format("block={} with post-norms={}: both add to one residual",
                         problem.option("block"), problem.option("post-norms"));
    if (auto reason = quantise_contradiction(problem); !reason.empty()) return reason;
    const char* const format = packed_format(problem).packed ? "weights"
                               : quantises(problem)          ? "quantise"
                                                             : nullptr;
    if (!format && has_dense_attention(problem))
      return "attn-weights=dense is of packed weights and quantise: give weights=" +
             packed_names() + ", or quantise=token or block, too";
    if (format && !has_dense_attention(problem) && problem.has("qkv-weights", "grouped"))
      return fmt::format("qkv-weights=grouped with {}={}: its rows are those of q, of k and of v",
                         format, problem.option(format));
    if (auto reason = contradiction_of_parts(problem, parts_of); !reason.empty()) return reason;
    const auto behind = mixer_of(problem).contradiction_of_parts;
    return behind == nullptr ? "" : behind(problem);
  }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return *tensors_.of(problem, [&] { return tensors_of(problem); });
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    return *stages_.of(problem, [&] { return stages_of(problem); });
  }

  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    const auto parts = parts_of(problem);
    std::vector<std::pair<const OpPart*, std::size_t>> stages;
    for (const OpPart& part : parts)
      for (std::size_t i = 0; i < part.op->stages(part.problem).size(); ++i)
        stages.emplace_back(&part, i);
    const auto [part, own] = stages.at(stage % stages.size());
    const std::int64_t layers = size_or(problem, "layers", 0);
    const auto at = static_cast<std::int64_t>(stage / stages.size());
    reference_of_part(*part, own, tensors, parallel, [&, part = part](const std::string& name) {
      const std::string& whole = part->tensor(name);
      return layers == 0 ? whole : name_in_all(whole, at, layers);
    });
  }

  std::vector<OpPart> parts(const Problem& problem) const override { return parts_of(problem); }

  std::optional<Repetition> repetition(const Problem& problem) const override {
    if (!problem.sizes.contains("layers")) return std::nullopt;
    return *repetitions_.of(problem, [&] { return repetition_of(problem); });
  }

  std::vector<const Family*> families() const override {
    static const auto families = [] {
      std::deque<PartFamily> all;
      for (const PartKind& kind : part_kinds())
        for (const Family* family : kind.op().families())
          if (has_stages(kind, *family))
            all.emplace_back(layer_op, kind.name, *family,
                             [](const Family&, const Problem&, const DeviceFacts& facts,
                                Program& program) { launch_programmatically(program, facts); });
      return all;
    }();
    // Untuned a norm is a kernel of its own: behind another it takes about a microsecond, no more
    // than it takes each block of a product to find the deviations, and only a search can tell.
    std::vector<const Family*> list = persistent_layers();
    for (const Family* family : sums()) list.push_back(family);
    for (const PartFamily& family : families) list.push_back(&family);
    for (const Family* family : normed_products()) list.push_back(family);
    return list;
  }

 private:
  static std::vector<StageSpec> stages_of(const Problem& problem) {
    const auto one = stages_of_parts(parts_of(problem));
    if (!problem.sizes.contains("layers")) return one;
    const std::int64_t layers = problem.size("layers");
    std::vector<StageSpec> stages;
    for (std::int64_t at = 0; at < layers; ++at)
      for (StageSpec stage : one) {
        stage.name = fmt::format("layers.{}.{}", at, stage.name);
        for (auto* names : {&stage.inputs, &stage.outputs})
          for (std::string& name : *names) name = name_in_all(name, at, layers);
        stages.push_back(std::move(stage));
      }
    return stages;
  }

  static Repetition repetition_of(const Problem& problem) {
    const std::int64_t layers = problem.size("layers");
    Repetition repetition{one_layer(problem), {}};
    std::map<std::string, std::size_t> all;
    for (const TensorSpec& tensor : layer_op().tensors(problem))
      all.emplace(tensor.name, all.size());
    const auto one = layer_op().tensors(repetition.one);
    for (std::int64_t at = 0; at < layers; ++at) {
      std::vector<std::size_t> places;
      for (const TensorSpec& tensor : one)
        places.push_back(all.at(name_in_all(tensor.name, at, layers)));
      repetition.places.push_back(std::move(places));
    }
    return repetition;
  }

  mutable OfLastProblems<std::vector<TensorSpec>> tensors_;
  mutable OfLastProblems<std::vector<StageSpec>> stages_;
  mutable OfLastProblems<Repetition> repetitions_;
};

}  // namespace

bool is_shared(const std::string& name) {
  return input_order().place(name) < static_cast<std::ptrdiff_t>(input_order().shared);
}

bool has_cache(const Problem& problem) {
  return mixer_needs(problem, "cache");
}

bool has_states(const Problem& problem) {
  return mixer_needs(problem, "width");
}

}  // namespace fftune::layer

const fftune::Op& fftune::layer_op() {
  static const layer::LayerOp op;
  return op;
}
