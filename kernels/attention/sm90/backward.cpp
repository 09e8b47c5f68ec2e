// The backward engine of sm_90a, host side: delta and zeros, the key blocks, dq in its dtype, and
// d_sinks.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/attention/copy_heads.hpp"
#include "kernels/attention/engine.hpp"
#include "kernels/attention/launch.hpp"
#include "kernels/attention/sm90/backward_config.cuh"
#include "kernels/attention/sm90/tile_search.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/struct_text.hpp"

namespace fftune::attention {
namespace {

constexpr const char* file = "attention/sm90/backward.cu";
constexpr int row_threads = 256;  // backward_row_threads of backward_rows.cuh

/// A configuration: the kernel's template argument, and its run-time argument.
struct Tile : sm90_backward_config {
  std::int64_t group = 1;
  /// Cycles of a CTA on average, and of the one with the most queries, which the group does not
  /// change; 0: not yet computed.
  mutable double block_cycles = 0, longest_cycles = 0;

  Tile() = default;
  explicit Tile(const Config& config)
      : sm90_backward_config{.bm = config.get("bm"),
                             .bn = config.get("bn"),
                             .mma_warpgroups = config.get("mma_warpgroups"),
                             .q_stages = config.get("q_stages"),
                             .do_stages = config.get("do_stages"),
                             .ds_stages = config.get("ds_stages"),
                             .dq = config.word("dq") == "bulk" ? dq_path::bulk : dq_path::direct,
                             .ahead = config.at("ahead") != 0,
                             .beside = config.word("around") == "beside"},
        group(config.at("group")) {}
};

std::string template_argument(const sm90_backward_config& config) {
  return StructText(
      "sm90_backward_config", "bm", config.bm, "bn", config.bn, "mma_warpgroups",
      config.mma_warpgroups, "q_stages", config.q_stages, "do_stages", config.do_stages,
      "ds_stages", config.ds_stages, "dq",
      config.dq == dq_path::bulk ? "fftune::dq_path::bulk" : "fftune::dq_path::direct", "ahead",
      config.ahead, "beside", config.beside);
}

/// Query blocks that see a key block.
struct QueryBlocks {
  double mean = 0, most = 0;
};
QueryBlocks query_blocks(const Layer& layer, const sm90_backward_config& config) {
  const std::int64_t queries = usual_queries(layer), keys = usual_keys(layer);
  const bool causal = layer.mask == Mask::causal;
  const auto all = static_cast<double>(quotient_up(queries, config.bm));
  if (!causal && layer.window == 0) return {all, all};
  constexpr std::int64_t most_counted = 512;
  const std::int64_t every = config.bn * quotient_up(quotient_up(keys, config.bn), most_counted);
  std::int64_t visits = 0, blocks = 0, most = 0;
  for (std::int64_t key = 0; key < keys; key += every, ++blocks) {
    // The first and the last query that sees a key of the block; the last one sees the last key.
    const std::int64_t first = causal ? std::max<std::int64_t>(key - (keys - queries), 0) : 0;
    const std::int64_t behind = key + config.bn - 1 - (keys - queries) + layer.window;
    const std::int64_t last = layer.window > 0 ? std::min(behind, queries) : queries;
    if (first >= last) continue;
    const std::int64_t own = quotient_up(last, config.bm) - first / config.bm;
    visits += own;
    most = std::max(most, own);
  }
  const auto counted = static_cast<double>(std::max<std::int64_t>(blocks, 1));
  return {static_cast<double>(visits) / counted, static_cast<double>(most)};
}

/// Cycles of a CTA: the query blocks that see its key block. A block costs its MMAs, the part of
/// the softmax that they do not hide, and a fixed cost for barriers.
double cycles_of_block(const Layer& layer, const attention_form& form, const Tile& config,
                       double blocks_seen) {
  const sm90_backward_plan plan = sm90_backward_plan_of(form, config);
  const auto keys = static_cast<double>(usual_keys(layer));
  const double visits = blocks_seen * static_cast<double>(layer.group());
  constexpr double flops_of_cycle = 4096, elements_of_cycle = 16;  // of an SM
  const double pairs = static_cast<double>(config.bm) * config.bn;
  // Two products of rows of a head, two of whole columns, and dq in slabs.
  const int columns = 2 * plan.score_k_steps * 16 +
                      2 * (plan.splits_dim ? config.mma_warpgroups : 1) * plan.gradient_columns +
                      plan.slabs * 64;
  const double mma = pairs * 2 * columns / flops_of_cycle;
  // A second stage of q and of d_out lets their loads run beneath a block.
  constexpr double of_load = 600;
  const double loads = (config.q_stages > 1 ? 0 : of_load) + (config.do_stages > 1 ? 0 : of_load);
  const double softmax = 0.6 * pairs / elements_of_cycle;
  const double barriers = 250 + (config.ds_stages == 1 ? 60 : 0) + (config.ahead ? 60 : 0) +
                          (plan.splits_dim ? 200 : 0);
  // Reductions from registers keep the warps that issue them waiting.
  const double dq = config.dq == dq_path::direct ? plan.dq_words / 64.0 : 0;
  // At head dim 256 registers of larger tiles, or of scores ahead, are spilled.
  const double spilled = layer.dim > 192 && (config.bm > 64 || config.ahead) ? 400 : 0;
  constexpr double of_block = 4000;  // its keys and values, and the stores of their gradients
  double block = visits * (mma + softmax + barriers + loads + dq + spilled) + of_block;
  if (config.beside) {
    const double queries_of_others =
        config.bn * static_cast<double>(usual_queries(layer) * layer.group()) / keys;
    constexpr double of_element = 6;
    block = std::max(block, of_element * queries_of_others * static_cast<double>(layer.dim));
    // CTAs of few queries end with what they do for other heads, and the next group waits for them:
    // under a causal mask, up to 31% more time. Without one head dim 128 has been timed.
    const bool is_known =
        layer.mask == Mask::none && layer.window == 0 && !layer.lengths && layer.dim == 128;
    if (!is_known) block *= 1.5;
  }
  return block;
}

/// Key blocks that an SM computes one after the other, those of `together` heads at the same time.
double rounds_of_blocks(const Layer& layer, const DeviceFacts& facts, const Tile& config,
                        double together) {
  const double blocks = std::ceil(static_cast<double>(usual_keys(layer)) / config.bn) *
                        static_cast<double>(layer.kv_heads * layer.b);
  const double share = blocks / static_cast<double>(facts.multiprocessors);
  if (layer.mask != Mask::causal) return std::max(1.0, std::ceil(share));
  // Blocks with the most queries come first in each group of heads, and even out. The last of
  // several small groups begins with them while others end: heads of 128, four a group 647 us, two
  // 971, one 1031, on an H200.
  constexpr double of_small_groups = 1.2;
  const double late =
      of_small_groups * std::max(0.0, 0.9 - static_cast<double>(config.group) / together);
  return std::max(1.0, share + 0.4 + (config.group < kv_matrices(layer) ? late : 0));
}

/// Heads of k and v whose queries launches prepare and whose dq launches convert, with `beside`:
/// the first group; and what is behind the groups that a whole group two later follows.
std::int64_t prepared_by_launch(const Layer& layer, const Tile& config) {
  return config.beside ? std::min(config.group, kv_matrices(layer)) : kv_matrices(layer);
}
std::int64_t converted_beside(const Layer& layer, const Tile& config) {
  if (!config.beside) return 0;
  return std::max<std::int64_t>(kv_matrices(layer) / config.group - 2, 0) * config.group;
}

/// Cycles of the launches around the blocks: they move delta's inputs, dq and its zeros through
/// memory.
double cycles_around(const Layer& layer, const DeviceFacts& facts, const Tile& config) {
  const double words_of_head = static_cast<double>(layer.s * layer.dim * layer.group());
  const auto prepared = static_cast<double>(prepared_by_launch(layer, config));
  const auto converted = static_cast<double>(kv_matrices(layer) - converted_beside(layer, config));
  constexpr double of_launches = 12000, bytes_of_cycle = 13;  // of an SM
  return of_launches + copy_cycles(layer, facts) +
         words_of_head * (prepared * 8 + converted * 6) / bytes_of_cycle /
             static_cast<double>(facts.multiprocessors);
}

double cycles(const Layer& layer, const DeviceFacts& facts, const attention_form& form,
              const Tile& config) {
  if (config.block_cycles == 0) {
    const QueryBlocks seen = query_blocks(layer, config);
    config.block_cycles = cycles_of_block(layer, form, config, seen.mean);
    config.longest_cycles = cycles_of_block(layer, form, config, seen.most);
  }
  // As many heads together as the SMs have blocks of: more, and their queries and dq leave L2;
  // fewer, and less is read by several at once.
  const auto keys = static_cast<double>(usual_keys(layer));
  const double together = static_cast<double>(facts.multiprocessors) / std::ceil(keys / config.bn);
  const double distance = std::abs(std::log2(static_cast<double>(config.group) / together));
  // Smaller groups are computed at the same time as those that wait for them to prepare.
  constexpr double of_wait = 40000;
  const double waits =
      config.beside ? std::max(together / static_cast<double>(config.group) - 1.1, 0.0) : 0.0;
  // Where SMs have one block each, the one with the most queries ends last.
  const double blocks =
      std::max(rounds_of_blocks(layer, facts, config, together) * config.block_cycles,
               config.longest_cycles);
  return blocks * (1 + 0.005 * distance) + cycles_around(layer, facts, config) + waits * of_wait;
}

using Tiles = TypedSpace<Tile>;

template <auto field>
void set(Tile& tile, std::int64_t value) {
  Tiles::to<field>(tile, value);
  tile.block_cycles = 0;
}

struct Model {
  static constexpr std::string_view name = "attention_bwd_sm90";
  static Tiles tiles(const Layer& layer, const DeviceFacts& facts);
  static Tile tile(const Layer&, const Config& config) { return Tile(config); }
  static constexpr auto cycles = attention::cycles;
};
using Search = TileSearch<Model>;

Tiles Model::tiles(const Layer& layer, const DeviceFacts& facts) {
  Tiles space{Tile()};
  space.parameter("bm", "queries of a tile", set<&Tile::bm>, {48, 64, 80, 96, 112, 128})
      .parameter("bn", "keys of a tile, and of a CTA", set<&Tile::bn>, {64, 128, 192})
      .parameter("mma_warpgroups", "MMA warpgroups of a CTA", set<&Tile::mma_warpgroups>, {2, 3})
      .parameter("q_stages", "blocks of q in shared memory", set<&Tile::q_stages>, {1, 2, 3})
      .parameter("do_stages", "blocks of d_out in shared memory", set<&Tile::do_stages>, {1, 2, 3})
      .parameter("ds_stages", "blocks of dS, for wide heads of P and dS, in shared memory",
                 set<&Tile::ds_stages>, {1, 2})
      .words("dq",
             "reduction of dq: bulk: TMA adds from shared memory; direct: reductions from "
             "registers",
             set<&Tile::dq>, {"bulk", "direct"})
      .parameter("ahead", "1: the next scores are computed under the end of a block; 0: after it",
                 set<&Tile::ahead>, {0, 1})
      .words("around",
             "where delta, zeros for dq and its conversion are computed; launch: in launches "
             "before and after the kernel; beside: by the kernel's idle producer warps, for all "
             "groups of heads but the first and the last",
             set<&Tile::beside>, {"launch", "beside"})
      .when_absent(0)
      .parameter("group", "heads of k and v whose blocks of keys are scheduled together",
                 Tiles::to<&Tile::group>, {1, 2, 4, 8, 16, 32, 64, 128})
      .when_absent_by([layer, facts] { return Search::default_config(layer, facts).at("group"); });
  space.constraint(
      "tiles must divide evenly among the MMA warpgroups, and fit in registers and shared memory",
      {"bm", "bn", "mma_warpgroups", "q_stages", "do_stages", "ds_stages", "dq", "ahead", "around"},
      [form = form_of(layer)](const Tile& t) { return sm90_backward_misfit(form, t) == nullptr; });
  space.constraint(
      "group is at most the number of heads of k", {"group"},
      [heads = kv_matrices(layer)](const Tile& t) { return t.group == 1 || t.group < 2 * heads; });
  return space;
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& values) {
  const Tile config(values);
  Program program;
  Launch launch(program, problem, facts, sizeof(sm90_backward_params),
                offsetof(sm90_backward_params, attention));
  const Layer& layer = launch.layer();
  const attention_form form = form_of(layer);
  const sm90_backward_plan plan = sm90_backward_plan_of(form, config);
  const auto small = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  const int batch = small(layer.b);
  const std::int64_t padded = sm90_backward_padded_rows(form, batch, small(layer.s), config.bm);
  const std::int64_t query_blocks = padded / config.bm;
  const std::int64_t key_blocks = sm90_backward_key_blocks(form, batch, small(layer.kv), config.bn);

  constexpr int box_columns = 64;
  const std::int64_t row = layer.heads * layer.dim, kv_row = layer.kv_heads * layer.dim;
  const HeadTensors tensors = head_tensors(program, launch, facts);
  const auto map = [&](const Pointer& tensor, std::int64_t row_of_tensor, bool of_keys) {
    const int tokens = of_keys ? config.bn : config.bm;
    return plan.head_boxes
               ? heads_map(tensors.layer, tensor, row_of_tensor, of_keys, tokens, box_columns)
               : rows_map(tensors.layer, tensor, row_of_tensor, of_keys, tokens, box_columns);
  };
  using Params = sm90_backward_params;
  auto fields = launch.fields<Params>();
  fields.set(&Params::q, map(tensors.q, tensors.layer.q_row, false), &Params::d_out,
             map(tensors.d_out, layer.heads * tensors.layer.dim, false), &Params::k,
             map(tensors.k, tensors.layer.k_row, true), &Params::v,
             map(tensors.v, tensors.layer.v_row, true), &Params::d_out_batch, layer.s * row,
             &Params::dq_batch, layer.s * row, &Params::dk_batch, layer.kv * kv_row,
             &Params::dv_batch, layer.kv * kv_row, &Params::d_out_row, row, &Params::dq_row, row,
             &Params::dk_row, kv_row, &Params::dv_row, kv_row, &Params::padded_rows, padded);
  const auto delta = launch.scratch(layer.heads * padded * 4),
             dq_partials = launch.scratch(layer.heads * query_blocks * plan.dq_words * 4);
  launch.attention().set(&attention_params::group, config.group, &attention_params::delta, delta,
                         &attention_params::dq_partials, dq_partials);
  fields.set(&Params::lse_log2, launch.scratch(layer.heads * padded * 4));
  if (layer.deterministic)
    fields.set(&Params::turns,
               launch.scratch(layer.heads * query_blocks * config.mma_warpgroups * 4));

  const auto append = [&](const char* kernel, Dim3 grid, int threads, int shared_bytes = 0) {
    launch.append(file,
                  fmt::format("attention_backward_{}<{}, {}>", kernel,
                              attention::template_argument(form), template_argument(config)),
                  grid, threads, shared_bytes);
  };
  const Dim3 by_queries{static_cast<std::uint32_t>(query_blocks),
                        static_cast<std::uint32_t>(layer.heads), 1};
  // Blocks for the heads of queries that share `matrices` heads of k and v.
  const auto of_heads = [&](std::int64_t matrices) {
    return config.beside ? Dim3{static_cast<std::uint32_t>(query_blocks / layer.b),
                                static_cast<std::uint32_t>(matrices * layer.group()), 1}
                         : by_queries;
  };
  const std::int64_t converted = converted_beside(layer, config);
  if (config.beside) {
    const auto prepared = launch.scratch(kv_matrices(layer) * 4),
               finished = launch.scratch(kv_matrices(layer) * 4);
    fields.set(&Params::prepared, prepared, &Params::finished, finished, &Params::first_converted,
               converted * layer.group());
  }
  append("prepare", of_heads(prepared_by_launch(layer, config)), row_threads);
  append("sm90", {static_cast<std::uint32_t>(key_blocks * kv_matrices(layer)), 1, 1}, plan.threads,
         plan.shared_bytes);
  append("convert", of_heads(kv_matrices(layer) - converted), row_threads);
  if (layer.sinks) append("sinks", {static_cast<std::uint32_t>(layer.heads), 1, 1}, row_threads);
  return program;
}

}  // namespace

constinit const Engine sm90_backward_engine{
    .name = Model::name,
    .summary = "TMA and wgmma, a block of keys of a head for each CTA",
    .backward = true,
    .can_implement = refuse_sm90,
    .search = Search::side,
    .program = program,
    .sources = {file, copy_heads_source}};

}  // namespace fftune::attention
