// Latent attention over a cache of latents: products in front of it, RoPE and the cache's rows, and
// the absorbed form (mla/mla.hpp).
#include <fmt/format.h>

#include <cmath>
#include <string>
#include <utility>

#include "kernels/common/op_parts.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "kernels/gemm/quantise/quantise.hpp"
#include "kernels/head_linear/head_linear.hpp"
#include "kernels/layer/mixer.hpp"
#include "kernels/layer/sequences.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/mla/mla.hpp"
#include "kernels/mla_rope/mla_rope.hpp"
#include "kernels/norm/norm.hpp"

namespace fftune::layer {
namespace {

/// Sizes of a head, and of the latents.
struct Latent {
  std::int64_t heads, nope, rope, v, rank;

  explicit Latent(const Problem& problem)
      : heads(problem.size("heads")),
        nope(problem.size("nope")),
        rope(problem.size("rope")),
        v(problem.size("v-dim")),
        rank(problem.size("rank")) {}
};

std::string latent_eps(const Problem& problem) {
  return option_or(problem, "latent-eps", usual_eps);
}

void add_projection(PartList& parts, const char* name, const char* x, std::int64_t k,
                    std::int64_t n, const char* w, const char* y) {
  parts.add(name, linear_op(), {{"m", parts.tokens()}, {"k", k}, {"n", n}}, {},
            {{"x", x}, {"w", w}, {"y", y}});
}

/// The queries of all heads, from x or by way of a latent of their own. RoPE turns them linearly,
/// so their factors may stand in front of it.
void add_queries(PartList& parts, const char* x, const Latent& latent) {
  const Problem& problem = parts.problem();
  const char* const y = problem.has("query-scale", "rows") ? "q_unscaled" : "q_raw";
  const std::int64_t d = problem.size("d"), n = latent.heads * (latent.nope + latent.rope);
  if (!problem.sizes.contains("q-rank")) {
    add_projection(parts, "q", x, d, n, "w_q", y);
    add_query_scale(parts, y, "q_raw", n);
    return;
  }
  const std::int64_t rank = problem.size("q-rank");
  add_projection(parts, "q_a", x, d, rank, "w_q_a", "q_a_raw");
  parts.add(
      "q_a_norm", rmsnorm_op(), {{"m", parts.tokens()}, {"d", rank}},
      {{"convention", option_or(problem, "convention", "llama")}, {"eps", latent_eps(problem)}},
      {{"x", "q_a_raw"}, {"w", "q_a_norm"}, {"y", "q_a_normalised"}});
  add_projection(parts, "q", "q_a_normalised", rank, n, "w_q_b", y);
  add_query_scale(parts, y, "q_raw", n);
}

void add_rope(PartList& parts, const Latent& latent) {
  const Problem& problem = parts.problem();
  PartList::Sizes sizes{{"m", parts.tokens()}, {"heads", latent.heads},
                        {"nope", latent.nope}, {"rope", latent.rope},
                        {"rank", latent.rank}, {"cache-slots", cache_rows(problem)}};
  if (problem.sizes.contains("positions")) sizes["positions"] = problem.size("positions");
  const std::string rotation = option_or(problem, "rotation", "halves");
  PartList::Options options{{"rotation", rotation},
                            {"rope-order", option_or(problem, "rope-order", "same")},
                            {"eps", latent_eps(problem)}};
  if (rotation != "none") {
    options["angles"] = option_or(problem, "angles", "base");
    for (const char* name : {"base", "factor", "context", "low", "high", "beta-fast", "beta-slow"})
      if (problem.options.contains(name)) options[name] = problem.option(name);
    if (problem.options.contains("rope-scale")) options["scale"] = problem.option("rope-scale");
  }
  parts.add("rope", mla_rope_op(), std::move(sizes), std::move(options),
            {{"q", "q_raw"}, {"kv", "kv_a_raw"}, {"norm", "kv_a_norm"}});
}

/// A product of the heads with some rows of theirs in w_kv_b.
void add_head_product(PartList& parts, const char* name, const Latent& latent, const char* x,
                      const char* y, bool absorbs) {
  PartList::Sizes sizes{{"m", parts.tokens()},
                        {"heads", latent.heads},
                        {"n", absorbs ? latent.rank : latent.v},
                        {"k", absorbs ? latent.nope : latent.rank},
                        {"w-rows", latent.nope + latent.v}};
  if (absorbs)
    sizes["x-head"] = latent.nope + latent.rope;
  else
    sizes["w-skip"] = latent.nope;
  parts.add(name, head_linear_op(), std::move(sizes), {{"layout", absorbs ? "kn" : "nk"}},
            {{"x", x}, {"w", "w_kv_b"}, {"y", y}});
}

void add_latent_attention(PartList& parts, const Latent& latent) {
  const Problem& problem = parts.problem();
  PartList::Sizes sizes{{"b", problem.size("batch")},  {"s", size_or(problem, "s", 1)},
                        {"kv", problem.size("cache")}, {"heads", latent.heads},
                        {"rank", latent.rank},         {"rope", latent.rope}};
  for (const char* name : {"page", "pages"})
    if (problem.sizes.contains(name)) sizes[name] = problem.size(name);
  // The expanded keys have nope + rope features, by which scores are scaled.
  std::string scale = option_or(problem, "scale", "0");
  if (scale == "0")
    scale = fmt::format(
        "{}", static_cast<float>(1 / std::sqrt(static_cast<double>(latent.nope + latent.rope))));
  parts.add("mla", mla_op(), std::move(sizes), {{"lengths", "yes"}, {"scale", scale}},
            {{"out", "out_latent"}});
}

void add_parts(PartList& parts, const MixerPlace& place) {
  const Problem& problem = parts.problem();
  const Latent latent(problem);
  add_queries(parts, place.x, latent);
  add_projection(parts, "kv_a", place.x, problem.size("d"), latent.rank + latent.rope, "w_kv_a",
                 "kv_a_raw");
  add_rope(parts, latent);
  add_head_product(parts, "absorb", latent, "q_raw", "q_latent", true);
  add_latent_attention(parts, latent);
  add_head_product(parts, "values", latent, "out_latent", "attended", false);
  add_out_product(parts, place, add_output_gate(parts, place, latent.v), latent.heads * latent.v);
}

std::string contradiction(const Problem& problem) {
  if (auto reason = contradiction_of_cache(problem); !reason.empty()) return reason;
  if (problem.has("output-gate", "q-rows"))
    return "output-gate=q-rows with mixer=mla: its gates have a product of their own";
  if (packs_attention(problem) || (quantises(problem) && !has_dense_attention(problem)))
    return "mixer=mla has dense weights: give attn-weights=dense beside packed weights or quantise";
  return "";
}

std::vector<PartKind> part_kinds_of_mla() {
  const std::vector<std::string> product{linear::stage_product}, one{stage_forward};
  return {{"q_a", linear_op, product}, {"q_a_norm", rmsnorm_op, one},
          {"q", linear_op, product},   {"kv_a", linear_op, product},
          {"rope", mla_rope_op, one},  {"absorb", head_linear_op, one},
          {"mla", mla_op, one},        {"values", head_linear_op, one},
          mixer_product_kind("gate"),  output_gate_kind(),
          query_scale_kind()};
}

}  // namespace

const Mixer& mla_mixer() {
  static const Mixer mixer{
      .name = "mla",
      .summary = "latent attention in the absorbed form, over a cache of latents",
      .needed = {"heads", "nope", "rope", "v-dim", "rank", "cache"},
      .fields = {"q-rank",     "page",       "pages",      "positions",   "rotation",
                 "rope-order", "latent-eps", "scale",      "lengths",     "angles",
                 "base",       "factor",     "context",    "low",         "high",
                 "beta-fast",  "beta-slow",  "rope-scale", "output-gate", "query-scale"},
      .shared_inputs = {"positions", "angles", "slots", "lengths", "pages"},
      .inputs = {"w_q", "w_q_a", "q_a_norm", "w_q_b", "w_kv_a", "kv_a_norm", "w_kv_b", "cache",
                 "q_factors", "w_g"},
      .add_parts = add_parts,
      .part_kinds = part_kinds_of_mla,
      .contradiction = contradiction,
      .contradiction_of_parts = contradiction_of_pages,
      .set_draw = Sequences::set_draw};
  return mixer;
}

}  // namespace fftune::layer
