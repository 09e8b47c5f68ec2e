// The parts of a layer: problems of other ops, and the names of their tensors here.
#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/act_mul/act_mul.hpp"
#include "kernels/all_reduce/all_reduce.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/layer/layer.hpp"
#include "kernels/layer/mixer.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/moe/moe.hpp"
#include "kernels/moe_route/moe_route.hpp"
#include "kernels/norm/norm.hpp"
#include "kernels/scale/scale.hpp"
#include "registry/last_problems.hpp"

namespace fftune::layer {
namespace {

class Parts {
 public:
  using Names = PartList::Names;

  explicit Parts(const Problem& problem)
      : problem_(problem),
        list_(problem),
        tokens_(list_.tokens()),
        norms_first_(!problem.has("post-norms", "only")),
        post_norms_(problem.has("post-norms", "yes") || !norms_first_),
        sliced_(problem.sizes.contains("ranks")),
        mixes_(&mixer_of(problem) != &no_mixer()),
        squares_(problem.has("act", "relu2")),
        beside_(problem.options.contains("block") && !problem.has("block", "serial")) {}

  std::vector<OpPart> all() {
    if (mixes_) add_mixer();
    if (has_network(problem_)) add_network();
    if (problem_.sizes.contains("input-h")) add_input();
    if (problem_.has("layer-scalar", "yes"))
      add("scalar", scale_op(), {{"m", tokens_}, {"h", problem_.size("d")}}, {{"in-place", "no"}},
          {{"x", "unscaled"}, {"factor", "layer_scalar"}});
    return list_.take();
  }

 private:
  void add_mixer() {
    if (norms_first_) add_norm("attn_norm", "x", "normalised");
    mixer_of(problem_).add_parts(list_, {norms_first_ ? "normalised" : "x", out_y(), out_adds()});
    normed_ = add_attn_reduce();
    if (post_norms_)
      add_post_norm("attn_post_norm", sliced_ ? "attn_sum" : "attn_out", "x", mixed_y());
  }

  void add_network() {
    const bool shares_norm = problem_.has("block", "parallel");
    if (norms_first_ && !shares_norm && !normed_)
      add_norm("ffn_norm", beside_ ? "x" : mid(), "ffn_normalised");
    ffn_input_ = !norms_first_ ? mid() : shares_norm ? "normalised" : "ffn_normalised";
    if (has_experts(problem_))
      add_experts();
    else
      add_ffn();
    if (sliced_)
      add_reduce("ffn_reduce", post_norms_ ? "no" : "yes", "none",
                 {{"x", "ffn_out"},
                  {"residual", beside_ ? "x" : mid()},
                  {"y", post_norms_ ? "ffn_sum" : last_y()}});
    if (post_norms_)
      add_post_norm("ffn_post_norm", sliced_ ? "ffn_sum" : "ffn_out", mid(), last_y());
  }

  void add(const char* name, const Op& op, PartList::Sizes sizes, PartList::Options options,
           Names names, std::optional<DType> dtype = std::nullopt) {
    list_.add(name, op, std::move(sizes), std::move(options), std::move(names), dtype);
  }

  std::map<std::string, std::int64_t> row_sizes() const {
    return {{"m", tokens_}, {"d", problem_.size("d")}};
  }

  std::map<std::string, std::string> rms_options(const char* residual) const {
    return {{"convention", option_or(problem_, "convention", "llama")},
            {"residual", residual},
            {"eps", option_or(problem_, "eps", usual_eps)}};
  }

  /// The weights have the part's name.
  void add_norm(const std::string& name, const char* x, const char* y) {
    Names names{{"x", x}, {"w", name}, {"b", name + "_bias"}, {"y", y}};
    if (problem_.has("norm", "layer"))
      add(name == "attn_norm" ? "attn_layernorm" : "ffn_layernorm", layernorm_op(), row_sizes(),
          {{"eps", option_or(problem_, "eps", usual_eps)}}, std::move(names));
    else
      add(name.c_str(), rmsnorm_op(), row_sizes(), rms_options("no"), std::move(names));
  }

  /// A norm of a sublayer's output, which is added to the residual.
  void add_post_norm(const char* name, const char* x, const char* residual, const char* y) {
    add(name, rmsnorm_op(), row_sizes(), rms_options("after"),
        {{"x", x}, {"w", name}, {"residual", residual}, {"y", y}});
  }

  /// The sum of a sublayer's output over the ranks: each rank has a summand.
  void add_reduce(const char* name, const char* residual, const std::string& norm, Names names) {
    auto sizes = row_sizes();
    sizes["ranks"] = problem_.size("ranks");
    add(name, all_reduce_op(), std::move(sizes),
        {{"norm", norm},
         {"residual", residual},
         {"eps", option_or(problem_, "eps", usual_eps)},
         {"link", option_or(problem_, "link", "loopback")}},
        std::move(names));
  }

  /// That of attention, with the norm behind it where that is an RMSNorm; returns whether it is.
  /// Beside a feed-forward network the sum is that of both.
  bool add_attn_reduce() {
    if (!sliced_ || beside_) return false;
    const bool normed = !post_norms_ && !problem_.has("norm", "layer");
    add_reduce("attn_reduce", post_norms_ ? "no" : "yes",
               normed ? option_or(problem_, "convention", "llama") : "none",
               {{"x", "attn_out"},
                {"residual", "x"},
                {"w", "ffn_norm"},
                {"sum", "mid"},
                {"y", normed        ? "ffn_normalised"
                      : post_norms_ ? "attn_sum"
                                    : "mid"}});
    return normed;
  }

  /// Whether attention's output has its residual added by the product, and so the network's.
  bool out_adds() const { return !post_norms_ && !sliced_; }
  bool ffn_adds() const { return !post_norms_ && (!sliced_ || beside_); }
  /// Outputs of the sublayers. A rank's slice of a network beside attention adds to its own output.
  const char* out_y() const { return out_adds() ? mixed_y() : "attn_out"; }
  const char* ffn_residual() const { return sliced_ ? "attn_out" : mid(); }
  const char* ffn_y() const { return post_norms_ || sliced_ ? "ffn_out" : last_y(); }
  /// The network adds to the sum behind the mixer, or to x without one. And where that sum is.
  const char* mid() const { return mixes_ ? "mid" : "x"; }
  const char* mixed_y() const { return has_network(problem_) ? "mid" : last_y(); }
  /// The sum with the feed-forward network, and the one with the layer's own input if there is
  /// that; the last one is the output, or what a scalar multiplies.
  const char* last_y() const { return problem_.sizes.contains("input-h") ? "ffn_y" : input_y(); }
  const char* input_y() const { return problem_.has("layer-scalar", "yes") ? "unscaled" : "y"; }

  /// ffn_y + norm((act(ffn_y·w_input_gateᵀ) ⊙ layer_input)·w_input_outᵀ).
  void add_input() {
    const std::int64_t d = problem_.size("d"), features = problem_.size("input-h");
    add("input_gate", linear_op(), {{"m", tokens_}, {"k", d}, {"n", features}}, {},
        {{"x", "ffn_y"}, {"w", "w_input_gate"}, {"y", "input_gates"}});
    add("input_gated", act_mul_op(), {{"m", tokens_}, {"h", features}},
        {{"act", option_or(problem_, "act", "silu")}},
        {{"gate", "input_gates"}, {"up", "layer_input"}, {"out", "input_gated"}});
    add("input_out", linear_op(), {{"m", tokens_}, {"k", features}, {"n", d}}, {},
        {{"x", "input_gated"}, {"w", "w_input_out"}, {"y", "input_out"}});
    add_post_norm("input_norm", "input_out", "ffn_y", input_y());
  }

  /// The activation of networks: relu(x)² without a gate is relu(x) of a gate times x, which both
  /// are the product with w_up. Kernels read a weight twice from a cache at most.
  std::string activation() const { return squares_ ? "relu" : option_or(problem_, "act", "silu"); }

  /// A network whose gates have factors in front of their activation.
  void add_scaled_ffn() {
    const std::int64_t d = problem_.size("d"), h = problem_.size("h");
    add("ffn_gate", linear_op(), {{"m", tokens_}, {"k", d}, {"n", h}}, {{"y-scale", "yes"}},
        {{"x", ffn_input_}, {"w", "w_gate"}, {"y_scale", "gate_scale"}, {"y", "ffn_gates"}});
    add("ffn_up", linear_op(), {{"m", tokens_}, {"k", d}, {"n", h}}, {},
        {{"x", ffn_input_}, {"w", "w_up"}, {"y", "ffn_up"}});
    add("ffn_gated", act_mul_op(), {{"m", tokens_}, {"h", h}}, {{"act", activation()}},
        {{"gate", "ffn_gates"}, {"up", "ffn_up"}, {"out", "hidden"}});
    add("ffn_down", linear_op(), {{"m", tokens_}, {"k", h}, {"n", d}},
        {{"y-scale", scales()}, {"residual", ffn_adds() ? "yes" : "no"}},
        {{"x", "hidden"},
         {"w", "w_down"},
         {"y_scale", list_.scale_of("ffn_scale")},
         {"residual", ffn_residual()},
         {"y", ffn_y()}});
  }

  void add_ffn() {
    if (problem_.has("gate-scale", "yes")) return add_scaled_ffn();
    const bool gated = squares_ || !problem_.has("ffn", "plain");
    const bool bias = problem_.has("ffn-bias", "yes");
    std::map<std::string, std::string> options{{"act", activation()},
                                               {"gate", gated ? "yes" : "no"},
                                               {"bias", !bias   ? "none"
                                                        : gated ? "down"
                                                                : "both"},
                                               {"y-scale", scales()},
                                               {"weights", option_or(problem_, "weights", "dense")},
                                               {"quantise", quantise()},
                                               {"residual", ffn_adds() ? "yes" : "no"}};
    add_format(options);
    add("ffn", ffn_op(), {{"m", tokens_}, {"d", problem_.size("d")}, {"h", problem_.size("h")}},
        std::move(options),
        with_gate({{"x", ffn_input_},
                   {"x_quantised", "ffn_quantised"},
                   {"x_scale", "ffn_scale"},
                   {"y_scale", list_.scale_of("ffn_scale")},
                   {"residual", ffn_residual()},
                   {"y", ffn_y()}},
                  "w_up"));
  }

  /// The names of a network's tensors, with that of the gate's weight where it is `up`.
  Names with_gate(Names names, const char* up) const {
    if (squares_) names["w_gate"] = up;
    return names;
  }

  std::string quantise() const { return list_.quantise(); }
  std::string scales() const { return list_.scales(); }
  void add_format(PartList::Options& options) const { list_.add_format(options); }

  /// The router's product, the choice, and the experts.
  void add_experts() {
    const std::int64_t experts = problem_.size("experts"), choices = problem_.size("top-k");
    const std::string logits = option_or(problem_, "logits", "same");
    const bool normed = problem_.has("expert-norms", "yes"),
               scaled = problem_.has("expert-scale", "yes");
    if (normed) {
      add_norm("router_norm", "mid", "router_normalised");
      add_norm("experts_norm", "mid", "experts_normalised");
    }
    const char* const experts_input = normed ? "experts_normalised" : ffn_input_;
    add("router", linear_op(), {{"m", tokens_}, {"k", problem_.size("d")}, {"n", experts}},
        {{"bias", option_or(problem_, "router-bias", "no")}, {"output", logits}},
        {{"x", normed ? "router_normalised" : ffn_input_},
         {"w", "w_router"},
         {"bias", "b_router"},
         {"y", "router_logits"}});
    std::map<std::string, std::int64_t> of_route{
        {"m", tokens_}, {"top-k", choices}, {"experts", experts}};
    for (const char* name : {"groups", "top-groups"})
      if (problem_.sizes.contains(name)) of_route[name] = problem_.size(name);
    std::map<std::string, std::string> options{{"bias", option_or(problem_, "choice-bias", "no")}};
    for (const char* name : {"score", "order", "renormalise", "sum-eps", "group-score"})
      if (problem_.options.contains(name)) options[name] = problem_.option(name);
    if (problem_.options.contains("route-scale")) options["scale"] = problem_.option("route-scale");
    add("route", moe_route_op(), std::move(of_route), std::move(options),
        {{"logits", "router_logits"},
         {"bias", "choice_bias"},
         {"ids", "expert_ids"},
         {"weights", scaled ? "unscaled_weights" : "expert_weights"}},
        logits == "f32" ? DType::f32 : problem_.dtype);
    if (scaled)
      add("expert_scale", scale_op(), {{"m", tokens_}, {"h", choices}, {"factors", experts}},
          {{"in-place", "no"}, {"factor", "ids"}},
          {{"x", "unscaled_weights"},
           {"factor", "expert_scale"},
           {"ids", "expert_ids"},
           {"y", "expert_weights"}},
          DType::f32);
    const bool shares = problem_.sizes.contains("shared-h");
    if (shares) add_shared();
    if (normed)
      add("shared_post_norm", rmsnorm_op(), row_sizes(), rms_options("no"),
          {{"x", "shared_out"}, {"w", "shared_post_norm"}, {"y", "shared_normalised"}});
    const bool adds = (shares || ffn_adds()) && !normed;
    std::map<std::string, std::int64_t> sizes{{"m", tokens_},
                                              {"d", problem_.size("d")},
                                              {"h", problem_.size("h")},
                                              {"top-k", choices},
                                              {"experts", experts}};
    for (const char* name : {"shared", "own-experts"})
      if (problem_.sizes.contains(name)) sizes[name] = problem_.size(name);
    std::map<std::string, std::string> of_experts{
        {"act", activation()},
        {"routing", option_or(problem_, "routing", "uniform")},
        {"gate-up", option_or(problem_, "gate-up", "separate")},
        {"bias", problem_.has("ffn-bias", "yes") ? "all" : "none"},
        {"weights", option_or(problem_, "weights", "dense")},
        {"quantise", quantise()},
        {"residual", adds ? "yes" : "no"}};
    add_format(of_experts);
    add("experts", moe_ffn_op(), std::move(sizes), std::move(of_experts),
        with_gate({{"x", experts_input},
                   {"x_quantised", "experts_quantised"},
                   {"x_scale", "experts_scale"},
                   {"ids", "expert_ids"},
                   {"weights", "expert_weights"},
                   {"residual", shares ? "shared_out" : ffn_residual()},
                   {"y", normed ? "experts_out" : ffn_y()}},
                  "w_up"));
    if (normed) add_post_norm("experts_post_norm", "experts_out", "shared_normalised", ffn_y());
  }

  /// A shared MLP, which is added before the experts are. With a gate of its own, the
  /// sigmoid of one product, it is a mixture of one expert, weighted by that.
  void add_shared() {
    const std::int64_t d = problem_.size("d"), h = problem_.size("shared-h");
    const std::string residual = ffn_adds() ? "yes" : "no";
    Names names{{"x", ffn_input_},
                {"w_gate", "w_shared_gate"},
                {"w_up", "w_shared_up"},
                {"w_down", "w_shared_down"},
                {"residual", ffn_residual()},
                {"y", "shared_out"},
                {"hidden", "shared_hidden"},
                {"y_scale", list_.scale_of("ffn_scale")}};
    for (const char* name : {"x_quantised", "x_scale", "hidden_quantised", "hidden_scale"})
      names[name] = std::string("shared_") + name;
    for (const char* name : {"gate", "up", "down"})
      for (const char* part : {"_scale", "_zero", "_dense"})
        names[std::string("w_") + name + part] = std::string("w_shared_") + name + part;
    names = with_gate(std::move(names), "w_shared_up");
    std::map<std::string, std::string> options{{"act", activation()},
                                               {"residual", residual},
                                               {"weights", option_or(problem_, "weights", "dense")},
                                               {"quantise", quantise()}};
    add_format(options);
    if (!problem_.has("shared-gate", "yes")) {
      options.insert({{"gate", "yes"}, {"bias", "none"}, {"y-scale", scales()}});
      add("shared", ffn_op(), {{"m", tokens_}, {"d", d}, {"h", h}}, std::move(options),
          std::move(names));
      return;
    }
    add("shared_router", linear_op(), {{"m", tokens_}, {"k", d}, {"n", 1}}, {},
        {{"x", ffn_input_}, {"w", "w_shared_router"}, {"y", "shared_logits"}});
    add("shared_route", moe_route_op(), {{"m", tokens_}, {"top-k", 1}, {"experts", 1}},
        {{"score", "sigmoid"}},
        {{"logits", "shared_logits"}, {"ids", "shared_ids"}, {"weights", "shared_weights"}});
    for (const char* name : {"ids", "weights", "offsets", "tokens", "places", "expert_out"})
      names[name] = std::string("shared_") + name;
    options.insert({{"routing", "uniform"}, {"gate-up", "separate"}});
    add("shared_experts", moe_ffn_op(),
        {{"m", tokens_}, {"d", d}, {"h", h}, {"top-k", 1}, {"experts", 1}}, std::move(options),
        std::move(names));
  }

  const Problem& problem_;
  PartList list_;
  std::int64_t tokens_;
  bool norms_first_, post_norms_;
  bool sliced_;          // a rank's, of a group
  bool mixes_;           // it has a mixer
  bool squares_;         // act=relu2
  bool beside_;          // the feed-forward network stands beside attention
  bool normed_ = false;  // the sum over ranks has normalised what the network reads
  const char* ffn_input_ = "";
};

}  // namespace

bool has_experts(const Problem& problem) {
  return problem.has("ffn", "moe");
}

bool has_network(const Problem& problem) {
  return !problem.has("ffn", "none");
}

bool has_dense_attention(const Problem& problem) {
  return problem.has("attn-weights", "dense");
}

bool packs_attention(const Problem& problem) {
  return packed_format(problem).packed && !has_dense_attention(problem);
}

std::vector<OpPart> parts_of(const Problem& problem) {
  static OfLastProblems<std::vector<OpPart>> last;
  return *last.of(problem, [&] { return Parts(problem).all(); });
}

std::vector<PartKind> part_kinds() {
  const auto rms = [](const char* name) { return PartKind{name, rmsnorm_op, {stage_forward}}; };
  const auto with_mean = [](const char* name) {
    return PartKind{name, layernorm_op, {stage_forward}};
  };
  const auto reduce = [](const char* name) {
    return PartKind{name, all_reduce_op, {stage_forward}};
  };
  const std::vector<std::string> of_ffn{ffn::stage_expand_gate_up,  ffn::stage_quantise,
                                        ffn::stage_gate_up,         ffn::stage_expand_down,
                                        ffn::stage_quantise_hidden, ffn::stage_down};
  auto of_experts = of_ffn;
  of_experts.insert(of_experts.end(), {moe::stage_own_ids, moe::stage_route, moe::stage_combine});
  std::vector<PartKind> kinds{rms("attn_norm"), with_mean("attn_layernorm")};
  for (const Mixer* mixer : mixers())
    for (PartKind& kind : mixer->part_kinds())  // several mixers may have one
      if (std::none_of(kinds.begin(), kinds.end(),
                       [&](const PartKind& known) { return known.name == kind.name; }))
        kinds.push_back(std::move(kind));
  append(kinds,
         {{"out", linear_op, {linear::stage_expand, linear::stage_quantise, linear::stage_product}},
          reduce("attn_reduce"),
          rms("attn_post_norm"),
          rms("ffn_norm"),
          with_mean("ffn_layernorm"),
          {"ffn",
           ffn_op,
           {ffn::stage_expand_gate_up, ffn::stage_quantise, ffn::stage_gate_up, ffn::stage_up,
            ffn::stage_expand_down, ffn::stage_quantise_hidden, ffn::stage_down}},
          {"ffn_gate", linear_op, {linear::stage_product}},
          {"ffn_up", linear_op, {linear::stage_product}},
          {"ffn_gated", act_mul_op, {stage_forward}},
          {"ffn_down", linear_op, {linear::stage_product}},
          {"router", linear_op, {linear::stage_product}},
          {"route", moe_route_op, {moe_route::stage}},
          {"expert_scale", scale_op, {stage_forward}},
          rms("router_norm"),
          rms("experts_norm"),
          {"shared", ffn_op, of_ffn},
          {"shared_router", linear_op, {linear::stage_product}},
          {"shared_route", moe_route_op, {moe_route::stage}},
          {"shared_experts", moe_ffn_op, of_experts},
          rms("shared_post_norm"),
          {"experts", moe_ffn_op, of_experts},
          rms("experts_post_norm"),
          reduce("ffn_reduce"),
          rms("ffn_post_norm"),
          {"input_gate", linear_op, {linear::stage_product}},
          {"input_gated", act_mul_op, {stage_forward}},
          {"input_out", linear_op, {linear::stage_product}},
          rms("input_norm"),
          {"scalar", scale_op, {stage_forward}}});
  return kinds;
}

}  // namespace fftune::layer
