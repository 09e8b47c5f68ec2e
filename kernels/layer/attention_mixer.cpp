// q, k and v of the new tokens, k and v into the caches, and attention over these.
#include <fmt/format.h>

#include <utility>

#include "kernels/attention/attention.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/layer/mixer.hpp"
#include "kernels/layer/sequences.hpp"
#include "kernels/qkv/qkv.hpp"

namespace fftune::layer {
namespace {

void add_cache_format(const Problem& problem, PartList::Options& options) {
  for (const char* name : {"cache-format", "cache-scales"})
    if (problem.options.contains(name)) options[name] = problem.option(name);
}

/// Whether the layer has no keys and values of its own.
bool shares_keys(const Problem& problem) {
  return problem.has("keys", "shared");
}

void add_qkv(PartList& parts, const MixerPlace& place) {
  const Problem& problem = parts.problem();
  const bool shares = shares_keys(problem);
  PartList::Sizes sizes{{"m", parts.tokens()},
                        {"d", problem.size("d")},
                        {"heads", problem.size("heads")},
                        {"dim", problem.size("dim")}};
  for (const char* name : {"rotary", "positions"})
    if (problem.sizes.contains(name)) sizes[name] = problem.size(name);
  if (!shares) {
    sizes["cache-slots"] = cache_rows(problem);
    if (problem.sizes.contains("kv-heads")) sizes["kv-heads"] = problem.size("kv-heads");
    if (problem.sizes.contains("kv-head")) sizes["cache-head"] = problem.size("kv-head");
  }
  const std::string rotation = option_or(problem, "rotation", "halves");
  // Norms of heads round nothing on the way, in either convention.
  const bool from_one = problem.has("convention", "gemma");
  PartList::Options options{
      {"bias", option_or(problem, "qkv-bias", "no")},
      {"norm", option_or(problem, "qk-norm", "no")},
      {"norm-order", option_or(problem, "qk-norm-order", "before")},
      {"v-norm", option_or(problem, "v-norm", "no")},
      {"weights",
       option_or(problem, packs_attention(problem) ? "weights" : "qkv-weights", "separate")},
      {"eps", option_or(problem, "eps", usual_eps)},
      {"convention", from_one ? "gemma" : "llama"},
      {"rotation", rotation},
      {"keys", shares ? "no" : "yes"},
      {"cache", shares ? "no" : "yes"}};
  if (rotation != "none") {
    options["angles"] = option_or(problem, "angles", "base");
    for (const char* name : {"base", "factor", "context", "low", "high", "beta-fast", "beta-slow"})
      if (problem.options.contains(name)) options[name] = problem.option(name);
    if (problem.options.contains("rope-scale")) options["scale"] = problem.option("rope-scale");
  }
  if (!shares) add_cache_format(problem, options);
  if (packs_attention(problem)) parts.add_format(options);
  if (!has_dense_attention(problem)) options["quantise"] = parts.quantise();
  if (problem.has("output-gate", "q-rows")) options["gates"] = "yes";
  parts.add("qkv", qkv_op(), std::move(sizes), std::move(options),
            {{"x", place.x},
             {"x_quantised", "qkv_quantised"},
             {"x_scale", "qkv_scale"},
             {"w", "w_qkv"},
             {"w_scale", "w_qkv_scale"},
             {"w_zero", "w_qkv_zero"},
             {"w_dense", "w_qkv_dense"},
             {"gates", "output_gates"},
             {"bias", "b_qkv"}});
}

void add_attention_parts(PartList& parts, const MixerPlace& place) {
  const Problem& problem = parts.problem();
  add_qkv(parts, place);
  const std::int64_t s = size_or(problem, "s", 1);
  PartList::Sizes sizes{{"b", problem.size("batch")},
                        {"s", s},
                        {"kv", problem.size("cache")},
                        {"heads", problem.size("heads")},
                        {"dim", problem.size("dim")}};
  for (const char* name : {"kv-heads", "window", "page", "pages", "kv-head"})
    if (problem.sizes.contains(name)) sizes[name] = problem.size(name);
  // A single query is at the last key, so causality masks nothing.
  PartList::Options options{{"lengths", "yes"},
                            {"mask", s > 1 ? "causal" : "none"},
                            {"sinks", option_or(problem, "sinks", "no")}};
  for (const char* name : {"softcap", "scale"})
    if (problem.options.contains(name)) options[name] = problem.option(name);
  add_cache_format(problem, options);
  const char* const q =
      add_query_scale(parts, "q", "q_scaled", problem.size("heads") * problem.size("dim"));
  parts.add("attention", attention_op(), std::move(sizes), std::move(options),
            {{"q", q}, {"k", "k_cache"}, {"v", "v_cache"}, {"out", "attended"}});
  const std::int64_t features = problem.size("heads") * problem.size("dim");
  add_out_product(parts, place, add_output_gate(parts, place, problem.size("dim")), features);
}

std::string contradiction_of_attention(const Problem& problem) {
  if (auto reason = contradiction_of_cache(problem); !reason.empty()) return reason;
  if (problem.sizes.contains("ranks") && problem.has("qk-norm", "rows"))
    return fmt::format("qk-norm=rows with ranks={}: a norm of all heads needs those of other ranks",
                       problem.size("ranks"));
  if (!shares_keys(problem)) return "";
  for (const auto& [name, usual] : {std::pair{"cache-format", "same"},
                                    {"qkv-weights", "separate"},
                                    {"weights", "dense"},
                                    {"quantise", "no"},
                                    {"output-gate", "no"}})
    if (option_or(problem, name, usual) != usual)
      return fmt::format(
          "keys=shared with {}={}: a layer without keys has dense weights of q alone", name,
          problem.option(name));
  return "";
}

std::vector<PartKind> attention_part_kinds() {
  return {{"qkv",
           qkv_op,
           {qkv::stage_expand, qkv::stage_quantise, qkv::stage_product, qkv::stage_heads}},
          query_scale_kind(),
          {"attention", attention_op, {stage_forward}},
          mixer_product_kind("gate"),
          output_gate_kind()};
}

}  // namespace

const Mixer& attention_mixer() {
  static const Mixer mixer{
      .name = "attention",
      .summary = "attention over a cache of keys and values",
      .needed = {"heads", "dim", "cache"},
      .fields = {"kv-heads",      "window",       "rotary",       "page",        "pages",
                 "kv-head",       "positions",    "qkv-bias",     "qkv-weights", "qk-norm",
                 "qk-norm-order", "sinks",        "rotation",     "softcap",     "scale",
                 "lengths",       "angles",       "base",         "factor",      "context",
                 "low",           "high",         "beta-fast",    "beta-slow",   "rope-scale",
                 "output-gate",   "cache-format", "cache-scales", "v-norm",      "keys",
                 "query-scale"},
      .shared_inputs = {"positions", "angles", "slots", "lengths", "pages"},
      .inputs = {"w_q",         "w_k",         "w_v",        "b_q",       "b_k",     "b_v",
                 "w_qkv",       "w_qkv_scale", "w_qkv_zero", "b_qkv",     "q_norm",  "k_norm",
                 "q_norm_bias", "k_norm_bias", "k_cache",    "v_cache",   "k_scale", "v_scale",
                 "sinks",       "q_factors",   "w_g",        "w_g_scale", "w_g_zero"},
      .add_parts = add_attention_parts,
      .part_kinds = attention_part_kinds,
      .contradiction = contradiction_of_attention,
      .contradiction_of_parts = contradiction_of_pages,
      .set_draw = Sequences::set_draw};
  return mixer;
}

}  // namespace fftune::layer
