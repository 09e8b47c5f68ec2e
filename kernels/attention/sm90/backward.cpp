// The backward family of sm_90a, host side: delta and zeros, the key blocks, dq in its dtype, and
// d_sinks.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <tuple>

#include "core/error.hpp"
#include "kernels/attention/families.hpp"
#include "kernels/attention/launch.hpp"
#include "kernels/attention/sm90/backward_config.cuh"
#include "kernels/common/stage_family.hpp"

namespace fftune::attention {
namespace {

constexpr const char* file = "attention/sm90/backward.cu";
constexpr int row_threads = 256;  // backward_row_threads of backward_rows.cuh

sm90_backward_config config_of(const Config& config) {
  return {.bm = config.get("bm"),
          .bn = config.get("bn"),
          .mma_warpgroups = config.get("mma_warpgroups"),
          .q_stages = config.get("q_stages"),
          .do_stages = config.get("do_stages"),
          .ds_stages = config.get("ds_stages"),
          .dq = config.word("dq") == "bulk" ? dq_path::bulk : dq_path::direct,
          .ahead = config.at("ahead") != 0};
}

std::string template_argument(const sm90_backward_config& config) {
  return fmt::format(
      "fftune::sm90_backward_config{{.bm = {}, .bn = {}, .mma_warpgroups = {}, .q_stages = {}, "
      ".do_stages = {}, .ds_stages = {}, .dq = fftune::dq_path::{}, .ahead = {}}}",
      config.bm, config.bn, config.mma_warpgroups, config.q_stages, config.do_stages,
      config.ds_stages, config.dq == dq_path::bulk ? "bulk" : "direct", config.ahead);
}

class Sm90Backward final : public StageFamily {
 public:
  Sm90Backward()
      : StageFamily({.name = "attention_bwd_sm90",
                     .summary = "TMA and wgmma, a block of keys of a head for each CTA",
                     .stage = stage_backward,
                     .pass = "bwd",
                     .sources = {file}}) {}

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto reason = refuse_cuda(problem, "bwd", facts)) return reason;
    return refuse_sm90(layer_of(problem), facts);
  }

  Space space(const Problem& problem, const DeviceFacts&) const override {
    const attention_form form = form_of(layer_of(problem));
    return Space()
        .parameter("bm", "queries of a tile", {48, 64, 80, 96, 112, 128})
        .parameter("bn", "keys of a tile, and of a CTA", {64, 128, 192})
        .parameter("mma_warpgroups", "MMA warpgroups of a CTA", {2, 3})
        .parameter("q_stages", "blocks of q in shared memory", {1, 2, 3})
        .parameter("do_stages", "blocks of d_out in shared memory", {1, 2, 3})
        .parameter("ds_stages", "blocks of dS, for wide heads of P and dS, in shared memory",
                   {1, 2})
        .parameter(
            "dq",
            "how dq is added up: bulk: TMA adds what is in shared memory; direct: reductions "
            "from registers",
            {"bulk", "direct"})
        .parameter("ahead", "1: the next scores are computed under the end of a block; 0: after it",
                   {0, 1})
        .constraint(
            "tiles split evenly among the MMA warpgroups, and fit in registers and shared "
            "memory",
            [form](const Config& c) { return sm90_backward_misfit(form, config_of(c)) == nullptr; },
            {"bm", "bn", "mma_warpgroups", "q_stages", "do_stages", "ds_stages", "dq", "ahead"});
  }

  // The largest tiles, as each block of queries is loaded once for every block of keys and the
  // other way around, two stages of q, and dq by TMA. Scores ahead of time take registers that wide
  // heads, masks in memory and the like need.
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    const auto feasible = space(problem, facts).feasible();
    if (feasible.empty())
      throw Error(ErrorKind::internal, "the space of attention_bwd_sm90 is empty");
    const Layer layer = layer_of(problem);
    const bool ahead = layer.dim <= 128 && !layer.masked() && !layer.bias && layer.softcap == 0 &&
                       !layer.deterministic;
    return *std::max_element(feasible.begin(), feasible.end(), [&](const auto& a, const auto& b) {
      const auto rank = [&](const Config& c) {
        const std::int64_t bn = c.at("bn");
        const auto two = [&](const char* stages) {
          return std::min<std::int64_t>(c.at(stages), 2);
        };
        const std::int64_t bm = std::min<std::int64_t>(c.at("bm"), layer.dim > 128 ? 64 : 128);
        return std::tuple(std::min<std::int64_t>(bn, 128), (c.at("ahead") != 0) == ahead,
                          two("q_stages"), c.word("dq") == "bulk", bm, two("do_stages"),
                          c.at("ds_stages"), -bn, -c.at("bm"), -c.at("q_stages"),
                          -c.at("do_stages"), -c.at("mma_warpgroups"));
      };
      return rank(a) < rank(b);
    });
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override;
};

Program Sm90Backward::program(const Problem& problem, const DeviceFacts& facts,
                              const Config& values) const {
  const sm90_backward_config config = config_of(values);
  Program program;
  Launch launch(program, problem, facts, sizeof(sm90_backward_params),
                offsetof(sm90_backward_params, attention));
  const Layer& layer = launch.layer();
  const Places& at = launch.places();
  const attention_form form = form_of(layer);
  const sm90_backward_plan plan = sm90_backward_plan_of(form, config);
  const auto small = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  const bool packed = form.packed_sequences();
  const int batch = small(layer.b);
  const std::int64_t padded = sm90_backward_padded_rows(form, batch, small(layer.s), config.bm);
  const std::int64_t query_blocks = padded / config.bm;
  const std::int64_t key_blocks = sm90_backward_key_blocks(form, batch, small(layer.kv), config.bn);
  const std::int64_t kv_matrices = layer.kv_heads * (packed ? 1 : layer.b);

  constexpr int box_columns = 64;
  const std::int64_t row = layer.heads * layer.dim, kv_row = layer.kv_heads * layer.dim;
  launch.set(offsetof(sm90_backward_params, q),
             rows_map(layer, at.q, layer.q_row, false, config.bm, box_columns));
  launch.set(offsetof(sm90_backward_params, d_out),
             rows_map(layer, at.d_out, row, false, config.bm, box_columns));
  launch.set(offsetof(sm90_backward_params, k),
             rows_map(layer, at.k, layer.k_row, true, config.bn, box_columns));
  launch.set(offsetof(sm90_backward_params, v),
             rows_map(layer, at.v, layer.v_row, true, config.bn, box_columns));
  launch.set(offsetof(sm90_backward_params, d_out_batch), layer.s * row);
  launch.set(offsetof(sm90_backward_params, dq_batch), layer.s * row);
  launch.set(offsetof(sm90_backward_params, dk_batch), layer.kv * kv_row);
  launch.set(offsetof(sm90_backward_params, dv_batch), layer.kv * kv_row);
  launch.set(offsetof(sm90_backward_params, d_out_row), small(row));
  launch.set(offsetof(sm90_backward_params, dq_row), small(row));
  launch.set(offsetof(sm90_backward_params, dk_row), small(kv_row));
  launch.set(offsetof(sm90_backward_params, dv_row), small(kv_row));
  launch.set(offsetof(sm90_backward_params, padded_rows), small(padded));
  // Heads of k and v whose heads of q have their rows in L2 together.
  launch.set_attention(
      offsetof(attention_params, group),
      small(heads_in_l2(layer, facts, kv_matrices,
                        (packed ? layer.s : usual_queries(layer)) * layer.group())));
  launch.set_attention(offsetof(attention_params, delta), launch.scratch(layer.heads * padded * 4));
  launch.set_attention(offsetof(attention_params, dq_partials),
                       launch.scratch(layer.heads * query_blocks * plan.dq_words * 4));
  launch.set(offsetof(sm90_backward_params, lse_log2), launch.scratch(layer.heads * padded * 4));
  if (layer.deterministic)
    launch.set(offsetof(sm90_backward_params, turns),
               launch.scratch(layer.heads * query_blocks * config.mma_warpgroups * 4));

  const auto append = [&](const char* kernel, Dim3 grid, int threads, int shared_bytes = 0) {
    launch.append(file,
                  fmt::format("attention_backward_{}<{}, {}>", kernel,
                              attention::template_argument(form), template_argument(config)),
                  grid, threads, shared_bytes);
  };
  const Dim3 by_queries{static_cast<std::uint32_t>(query_blocks),
                        static_cast<std::uint32_t>(layer.heads), 1};
  append("prepare", by_queries, row_threads);
  append("sm90", {static_cast<std::uint32_t>(key_blocks * kv_matrices), 1, 1}, plan.threads,
         plan.shared_bytes);
  append("convert", by_queries, row_threads);
  if (layer.sinks) append("sinks", {static_cast<std::uint32_t>(layer.heads), 1, 1}, row_threads);
  return program;
}

}  // namespace

const Family& attention_bwd_sm90_family() {
  static const Sm90Backward family;
  return family;
}

}  // namespace fftune::attention
