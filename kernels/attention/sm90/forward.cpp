// The forward engine of sm_90a, host side.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <queue>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/attention/engine.hpp"
#include "kernels/attention/launch.hpp"
#include "kernels/attention/sm90/config.cuh"
#include "kernels/attention/sm90/params.cuh"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/gemm/engine.hpp"

namespace fftune::attention {
namespace {

constexpr const char* file = "attention/sm90/forward.cu";
constexpr std::string_view name = "attention_sm90";

/// Heads of q in a tile.
int packed_heads(const Layer& layer, const Config& config) {
  return config.at("pack_heads") != 0 ? static_cast<int>(layer.group()) : 1;
}

attention_sm90_config config_of(const Layer& layer, const Config& config) {
  return {.mma_warpgroups = config.get("mma_warpgroups"),
          .bn = config.get("bn"),
          .stages = config.get("stages"),
          .ordered = config.at("ordered") != 0,
          .ctas_per_sm = config.get("ctas_per_sm"),
          .dynamic = config.word("scheduler") == "dynamic",
          .split_keys = config.at("split_keys") != 0,
          .paired = config.word("scheduler") == "paired",
          .packed_heads = packed_heads(layer, config)};
}

std::string template_argument(const attention_sm90_config& config) {
  return fmt::format(
      "fftune::attention_sm90_config{{.mma_warpgroups = {}, .bn = {}, .stages = {}, .ordered = {}, "
      ".ctas_per_sm = {}, .dynamic = {}, .split_keys = {}, .paired = {}, .packed_heads = {}}}",
      config.mma_warpgroups, config.bn, config.stages, config.ordered, config.ctas_per_sm,
      config.dynamic, config.split_keys, config.paired, config.packed_heads);
}

/// Whether some tiles see more keys than others.
bool has_unlike_tiles(const Layer& layer) {
  return layer.mask != Mask::none || layer.lengths || layer.layout == Layout::thd;
}

/// Queries of a tile.
std::int64_t tile_queries(const Layer& layer, const Config& config) {
  const int parts = config.at("split_keys") != 0 ? 1 : config.get("mma_warpgroups");
  return std::int64_t{64 / packed_heads(layer, config)} * parts;
}

/// Heads of k and v that are scheduled together by default: as many, in powers of two up to 128, as
/// there are or as L2 has room for.
std::int64_t usual_group(const Layer& layer, const DeviceFacts& facts) {
  const std::int64_t matrices = kv_matrices(layer), fit = heads_in_l2(layer, facts);
  std::int64_t group = 1;
  while (group < 128 && (fit >= matrices ? group < matrices : 2 * group <= fit)) group *= 2;
  return group;
}

/// Registers of an MMA thread: accumulators of the scores and of the output, the probabilities that
/// are multiplied meanwhile, words of a mask, and addresses; and what is added up of divided keys.
int registers_needed(const attention_form& form, const attention_sm90_config& config) {
  const attention_sm90_plan plan = attention_sm90_plan_of(form, config);
  const int probabilities = config.bn / 4;
  const int mask = form.mask == attention_mask::packed ? config.bn / 16 + 12 : 0;
  const int others = config.split_keys ? 56 : 32;
  return plan.score_registers + plan.out_registers + probabilities + mask + others;
}

/// Cycles until the last CTA is done, if each takes the longest tile that is left: `cycles` of the
/// tiles of a head, which `matrices` heads have each, the longest first.
double last_of_tiles(const std::vector<double>& cycles, std::int64_t matrices, std::int64_t ctas) {
  std::priority_queue<double, std::vector<double>, std::greater<>> done;
  double last = 0;
  for (const double own : cycles)
    for (std::int64_t i = 0; i < matrices; ++i) {
      double begin = 0;
      if (std::ssize(done) == ctas) {
        begin = done.top();
        done.pop();
      }
      done.push(begin + own);
      last = std::max(last, begin + own);
    }
  return last;
}

/// Cycles of the launch: each SM has its share of the tiles. A block of keys costs the MMAs and
/// exponentials of the warpgroups of an SM, and a fixed cost whatever its size.
double cycles(const Layer& layer, const DeviceFacts& facts, const Config& values) {
  const attention_sm90_config config = config_of(layer, values);
  const attention_form form = form_of(layer);
  const attention_sm90_plan plan = attention_sm90_plan_of(form, config);
  const auto queries = static_cast<double>(usual_queries(layer));
  const auto keys = static_cast<double>(usual_keys(layer));
  // A tile computes the blocks up to its last query's key, the last of them whole.
  double seen = keys;
  if (layer.mask == Mask::causal)
    seen = std::min(keys, keys - std::min(queries, keys) / 2 + plan.bm / 2.0);
  if (layer.window > 0) seen = std::min(seen, static_cast<double>(layer.window + plan.bm));
  double blocks = seen < keys ? seen / config.bn + 0.5 : std::ceil(keys / config.bn);
  double most_blocks = std::ceil(std::min(keys, seen * 2) / config.bn);
  if (config.split_keys) {
    blocks = blocks / 2 + 0.25;
    most_blocks = std::ceil(most_blocks / 2);
  }
  // Measured: wide heads hide exponentials beneath their MMAs, heads of 64 do not.
  constexpr double flops_of_cycle = 4096, exponentials_of_cycle = 16;  // of an SM
  const auto dim = static_cast<double>(layer.dim);
  const double pairs = 64.0 * config.bn * config.mma_warpgroups * config.ctas_per_sm;
  const double mma = pairs * 4 * dim / flops_of_cycle;
  const double softmax = pairs / exponentials_of_cycle * std::min(1.0, 64 / dim);
  const int warpgroups = config.mma_warpgroups * config.ctas_per_sm;
  const double short_of_registers = std::max(0, config.bn - 128) * dim / 16;
  constexpr double fixed_alone = 1300;  // of a warpgroup that overlaps no other's MMAs
  const double fixed = (warpgroups == 1 ? fixed_alone : 600) + (config.ordered ? 0 : 40) +
                       // With divided keys a warpgroup has half of the stages.
                       (config.stages > 2   ? 0
                        : config.split_keys ? 800
                                            : 30) +
                       (warpgroups == 2 && layer.dim <= 64 ? 300 : 0) + short_of_registers +
                       (config.mma_warpgroups == 3 && layer.dim > 64 ? 300 : 0);
  // Measured: pages of 16 keys come at no more than 34 bytes a cycle.
  constexpr double paged_bytes_of_cycle = 34;
  const double copies = layer.page > 0 ? 2.0 * plan.kv_bytes * config.ctas_per_sm : 0;
  const double of_block = std::max(mma + softmax + fixed, copies / paged_bytes_of_cycle);
  const auto tiles = static_cast<double>(quotient_up(usual_queries(layer), plan.bm) * layer.b *
                                         layer.heads / config.packed_heads);
  const double share = tiles / static_cast<double>(facts.multiprocessors * config.ctas_per_sm);
  // Its queries, its last product, and the store: CTAs that stay overlap them with the next tile.
  const std::string& scheduler = values.word("scheduler");
  const double of_tile = (share > 1 && scheduler == "single" ? 2500 : 1500) +
                         (config.split_keys ? 2100 : 0) +
                         // With a single tile per CTA, the first loads wait for those of all
                         // stages.
                         (share > 1 ? 0 : 350 * config.stages);
  const double tile_cycles = blocks * of_block + of_tile;
  // In one round the longest tile counts. Unlike tiles, the longest first, even out in several but
  // for the last, as do those of CTAs that share an SM.
  const bool evens_out = layer.mask == Mask::causal || config.ctas_per_sm > 1;
  const double rounds = evens_out ? share + 0.4 : std::ceil(share);
  const double longest = most_blocks * of_block;
  double all = std::max(rounds * tile_cycles, longest + of_tile);
  if (config.paired) {
    // The part with the first queries is done first; then the other one has the SM to itself.
    const double first = std::ceil(std::max(keys - queries + 64, 1.0) / config.bn);
    const double rest = std::max(0.0, most_blocks - first);
    const double alone = (mma + softmax) / 2 + fixed_alone + 4 * short_of_registers;
    all = first * of_block + rest * alone + of_tile;
  }
  // Few tiles do not even out.
  const std::int64_t ctas = facts.multiprocessors * config.ctas_per_sm;
  if (!config.paired && layer.mask == Mask::causal && layer.layout == Layout::bshd &&
      layer.window == 0 && tiles < 4 * static_cast<double>(ctas)) {
    std::vector<double> of_rows;
    for (std::int64_t row = layer.s; row > 0; row -= plan.bm) {
      const std::int64_t visible = std::max<std::int64_t>(row + layer.kv - layer.s, 0);
      std::int64_t steps = quotient_up(visible, config.bn);
      if (config.split_keys) steps = quotient_up(steps, 2);
      of_rows.push_back(static_cast<double>(steps) * of_block + of_tile);
    }
    all = last_of_tiles(of_rows, layer.b * layer.heads / config.packed_heads, ctas);
  }
  constexpr double of_launch = 6000;
  const double sharing = config.ctas_per_sm > 1 ? 1.15 : 1;  // of one SM's shared memory
  // Fixed turns that pass from heads to others do not even out unlike tiles: up to 1.6 times.
  const bool unbalanced = has_unlike_tiles(layer) && scheduler == "static";
  const double balance = !unbalanced ? 1 : values.at("group") < kv_matrices(layer) ? 1.2 : 1.03;
  // Unlike tiles even out among the tiles of many heads. With tiles of equal length, the SMs
  // process a few heads at a time in any order, and the fewer keys and values these read the
  // better.
  const bool unlike = has_unlike_tiles(layer);
  const double best_group = unlike ? static_cast<double>(usual_group(layer, facts)) : 1;
  const double locality =
      1 + (unlike ? 0.001 : 0.003) *
              std::abs(std::log2(static_cast<double>(values.at("group")) / best_group));
  // Measured: rows of several heads cost 1% where sequences are long. Without pages they were not
  // measured enough to be the default for little.
  const double packing = config.packed_heads == 1 ? 1 : layer.page > 0 ? 1.01 : 1.1;
  return packing * locality * balance * sharing * all + of_launch;
}

/// Keys of a block. They and split_keys decide the order of a row's sums: if that is to be fixed,
/// blocks suit every page, and fit for every number of queries.
std::vector<std::int64_t> blocks_of_keys(const Layer& layer) {
  if (!layer.batch_invariant) return {64, 80, 96, 112, 128, 160, 176, 192, 224};
  return {layer.dim <= 128 ? 128 : 64};
}

Space space(const Layer& layer, const DeviceFacts& facts) {
  const attention_form form = form_of(layer);
  const auto whole = [layer](const Config& c) { return config_of(layer, c); };
  Space space;
  space.parameter("mma_warpgroups", "MMA warpgroups of a CTA, of 64 queries each", {1, 2, 3})
      .parameter("bn", "keys of a block", blocks_of_keys(layer))
      .parameter("stages", "blocks of keys, and as many of values, in shared memory", {2, 3, 4})
      .parameter("ordered",
                 "1: MMA warpgroups issue their MMAs in turn, one's softmax beside the others' "
                 "MMAs; 0: as they come",
                 {0, 1})
      .parameter("ctas_per_sm", "CTAs that share an SM", {1, 2})
      .parameter("scheduler",
                 "single: a CTA for each tile; paired: one for 64 queries as far from the first as "
                 "64 others from the last; static: CTAs stay, with tiles in fixed turns; dynamic: "
                 "they take tiles from a counter",
                 {"single", "static", "dynamic", "paired"})
      .parameter(
          "split_keys",
          "1: two MMA warpgroups have the same queries and divide the keys; 0: each has its "
          "own",
          layer.batch_invariant ? std::vector<std::int64_t>{0} : std::vector<std::int64_t>{0, 1})
      .when_absent(0)
      .parameter("pack_heads",
                 "1: a tile has the queries of all heads that share keys; 0: those of one head",
                 {0, 1})
      .when_absent(0)
      .parameter("group", "heads of k and v whose tiles are scheduled together",
                 {1, 2, 4, 8, 16, 32, 64, 128})
      .when_absent_by(
          [layer, facts] { return default_config(sm90_engine, layer, facts).value("group"); })
      .constraint("the keys and values of heads together fit in L2, and where all do, all are",
                  [usual = usual_group(layer, facts),
                   all = heads_in_l2(layer, facts) >= kv_matrices(layer)](const Config& c) {
                    return all ? c.at("group") == usual : c.at("group") <= 2 * usual;
                  },
                  {"group"})
      .constraint(
          "one MMA warpgroup has none to take turns with",
          [](const Config& c) { return c.at("mma_warpgroups") > 1 || c.at("ordered") == 0; },
          {"mma_warpgroups", "ordered"})
      .constraint(
          "two CTAs share an SM's registers if each has one MMA warpgroup",
          [](const Config& c) { return c.at("ctas_per_sm") == 1 || c.at("mma_warpgroups") == 1; },
          {"mma_warpgroups", "ctas_per_sm"})
      .constraint(
          "two MMA warpgroups divide keys, in an even number of stages, where tiles are few; heads "
          "are narrow enough to be added up in registers, and no flags say which blocks there are",
          [layer, form, facts](const Config& c) {
            return c.at("split_keys") == 0 ||
                   (c.at("mma_warpgroups") == 2 && c.at("stages") % 2 == 0 && layer.dim <= 128 &&
                    form.mask != attention_mask::packed &&
                    query_tiles(layer, 128) < 2 * facts.multiprocessors && layer.kv > 64);
          },
          {"mma_warpgroups", "stages", "split_keys"})
      .constraint("a block of a packed mask is one or two of its tiles wide",
                  [form](const Config& c) {
                    return form.mask != attention_mask::packed || c.at("bn") == 64 ||
                           c.at("bn") == 128;
                  },
                  {"bn"})
      .constraint("a block of keys is a part of a page, or whole pages",
                  [page = layer.page](const Config& c) {
                    return page == 0 || c.at("bn") % page == 0 || page % c.at("bn") == 0;
                  },
                  {"bn"})
      .constraint("no more keys in a block than there are",
                  [layer](const Config& c) {
                    return c.at("bn") == 64 || c.at("bn") < layer.kv + 64 || layer.batch_invariant;
                  },
                  {"bn"})
      .constraint("no more MMA warpgroups than a sequence has queries for",
                  [layer](const Config& c) { return tile_queries(layer, c) < layer.s + 64; },
                  {"mma_warpgroups", "split_keys", "pack_heads"})
      .constraint(
          "heads of a tile are 2 to 64 that share keys, in rows of whole heads, without a "
          "packed mask",
          [layer, form](const Config& c) {
            return c.at("pack_heads") == 0 ||
                   (layer.group() > 1 && layer.group() <= 64 && layer.q_row % layer.dim == 0 &&
                    form.mask != attention_mask::packed);
          },
          {"pack_heads"})
      .constraint("scores, probabilities and the output are in an MMA thread's registers",
                  [form, whole](const Config& c) {
                    const auto config = whole(c);
                    const int have = attention_sm90_plan_of(form, config).mma_registers;
                    // The smallest blocks always fit, some of them barely.
                    return (config.bn == 64 && config.mma_warpgroups < 3) ||
                           registers_needed(form, config) <= have;
                  },
                  {"mma_warpgroups", "bn", "stages", "ordered", "ctas_per_sm", "scheduler",
                   "split_keys", "pack_heads"})
      .constraint("queries, and the stages of keys and values, fit in shared memory",
                  [form, facts, whole](const Config& c) {
                    const auto config = whole(c);
                    return fits_shared_memory(facts,
                                              attention_sm90_plan_of(form, config).shared_bytes,
                                              config.ctas_per_sm);
                  },
                  {"mma_warpgroups", "bn", "stages", "ordered", "ctas_per_sm", "scheduler",
                   "split_keys", "pack_heads"})
      .constraint("a counter balances tiles that are unlike",
                  [layer](const Config& c) {
                    return c.word("scheduler") != "dynamic" || has_unlike_tiles(layer);
                  },
                  {"scheduler"})
      .constraint(
          "two MMA warpgroups, each in its own time, pair the queries of a causal mask where each "
          "SM has one tile",
          [layer, facts](const Config& c) {
            return c.word("scheduler") != "paired" ||
                   (c.at("mma_warpgroups") == 2 && c.at("ordered") == 0 &&
                    c.at("split_keys") == 0 && c.at("pack_heads") == 0 &&
                    layer.mask == Mask::causal && layer.window == 0 && layer.s > 64 &&
                    query_tiles(layer, 128) <= facts.multiprocessors);
          },
          {"mma_warpgroups", "ordered", "scheduler", "split_keys", "pack_heads"})
      .constraint("the counter of tiles has 24 bits",
                  [layer](const Config& c) {
                    return c.word("scheduler") != "dynamic" ||
                           query_tiles(layer, 64) < attention_tile_counter::most_tiles;
                  },
                  {"scheduler"})
      .constraint("CTAs that stay have more than one tile each",
                  [layer, facts](const Config& c) {
                    return c.word("scheduler") == "single" || c.word("scheduler") == "paired" ||
                           query_tiles(layer, tile_queries(layer, c), packed_heads(layer, c)) >
                               facts.multiprocessors * c.at("ctas_per_sm");
                  },
                  {"mma_warpgroups", "ctas_per_sm", "scheduler", "split_keys", "pack_heads"});
  return space;
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& values) {
  Program program;
  Launch launch(program, problem, facts, sizeof(attention_sm90_params),
                offsetof(attention_sm90_params, attention));
  const Layer& layer = launch.layer();
  const attention_sm90_config config = config_of(layer, values);
  const attention_form form = form_of(layer);
  const attention_sm90_plan plan = attention_sm90_plan_of(form, config);
  launch.set_group(values.at("group"), config.packed_heads);
  TensorMapArgument q =
      rows_map(layer, launch.places().q, layer.q_row, false, 64, plan.slab_columns);
  if (config.packed_heads > 1) {
    q.columns = layer.dim;
    q.rows = layer.q_row / layer.dim;
    q.matrices = layer.q_tokens();
    q.box_rows = static_cast<std::uint32_t>(config.packed_heads);
    q.box_matrices = static_cast<std::uint32_t>(plan.part_queries);
  }
  launch.set(offsetof(attention_sm90_params, q), q);
  launch.set(offsetof(attention_sm90_params, k),
             rows_map(layer, launch.places().k, layer.k_row, true, config.bn, plan.slab_columns));
  launch.set(offsetof(attention_sm90_params, v),
             rows_map(layer, launch.places().v, layer.v_row, true, config.bn, plan.slab_columns));
  if (config.dynamic) launch.set(offsetof(attention_sm90_params, next_tile), launch.scratch(8));
  const std::string& scheduler = values.word("scheduler");
  std::int64_t ctas = query_tiles(layer, plan.bm, config.packed_heads);
  if (scheduler == "static" || scheduler == "dynamic")
    ctas = std::min<std::int64_t>(ctas, facts.multiprocessors * std::int64_t{config.ctas_per_sm});
  launch.append(file,
                fmt::format("attention_forward_sm90<{}, {}>", attention::template_argument(form),
                            template_argument(config)),
                {static_cast<std::uint32_t>(ctas), 1, 1}, plan.threads, plan.shared_bytes);
  return program;
}

}  // namespace

std::optional<std::string> refuse_sm90(const Layer& layer, const DeviceFacts& facts) {
  if (facts.compute_capability != 90)
    return fmt::format("wgmma is an instruction of compute capability 9.0 alone: {} has {}.{}",
                       facts.name, facts.compute_capability / 10, facts.compute_capability % 10);
  if (layer.dtype == DType::f32) return "wgmma multiplies bf16 and fp16, not f32";
  constexpr std::int64_t dims[] = {64, 96, 128, 192, 256};
  if (std::find(std::begin(dims), std::end(dims), layer.dim) == std::end(dims))
    return fmt::format("dim={} is not 64, 96, 128, 192 or 256", layer.dim);
  return misaligned_rows(layer);
}

std::optional<std::string> refuse_beside_sm90(const Layer& layer, const DeviceFacts& facts) {
  constexpr std::int64_t most_queries = 64;
  if (refuse_sm90(layer, facts)) return std::nullopt;
  if (layer.batch_invariant) return std::string(order_depends_on_rows);
  if (layer.s <= most_queries) return std::nullopt;
  return fmt::format("s={} has wgmma here, which is faster from {} queries on", layer.s,
                     most_queries);
}

constinit const Engine sm90_engine{.name = name,
                                   .summary = "TMA and wgmma, MMA warpgroups in turn",
                                   .can_implement = refuse_sm90,
                                   .search = {.space = space, .cycles = cycles},
                                   .program = program,
                                   .batch_invariant = true,
                                   .sources = {file}};

}  // namespace fftune::attention
