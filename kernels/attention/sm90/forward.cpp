// The forward engine of sm_90a, host side.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/attention/copy_heads.hpp"
#include "kernels/attention/engine.hpp"
#include "kernels/attention/launch.hpp"
#include "kernels/attention/sm90/config.cuh"
#include "kernels/attention/sm90/forward.hpp"
#include "kernels/attention/sm90/params.cuh"
#include "kernels/attention/sm90/tile_search.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/gemm/engine.hpp"

namespace fftune::attention {
namespace {

constexpr const char* file = forward_source;

/// In the order of the parameter's words.
enum class Scheduler { single, stays, dynamic, paired };

constexpr double unknown = -1;

/// Keys of a chunk of a batch-invariant layer; 0: its rows have one sum. Wide heads leave no room
/// in shared memory for sums over chunks, which have as many features as keys.
int chunk_of(const Layer& layer) {
  constexpr int keys = 512;
  const bool may = layer.dim <= 128 && layer.v_dim == layer.dim && !layer.masked();
  return layer.batch_invariant && may ? keys : 0;
}

/// A configuration of a layer, with the run-time arguments beside the kernel's template argument.
struct Tile : attention_sm90_config {
  std::int64_t heads_of_keys;  // heads of q that share a head of k and v
  int v_dim;
  Scheduler scheduler = Scheduler::single;
  bool packs_heads = false;
  std::int64_t group = 1;
  /// Cycles of all tiles, which the group does not change, once they have been computed.
  mutable double tile_cycles = unknown;

  explicit Tile(const Layer& layer)
      : heads_of_keys(layer.group()), v_dim(static_cast<int>(layer.v_dim)) {
    chunk = chunk_of(layer);
  }
  Tile(const Layer& layer, const Config& config) : Tile(layer) {
    mma_warpgroups = config.get("mma_warpgroups");
    bn = config.get("bn");
    stages = config.get("stages");
    ordered = config.at("ordered") != 0;
    ctas_per_sm = config.get("ctas_per_sm");
    const auto word = std::find(schedulers.begin(), schedulers.end(), config.word("scheduler"));
    schedule(word - schedulers.begin());
    split_keys = config.at("split_keys") != 0;
    divided = config.at("divided") != 0;
    pack(config.at("pack_heads"));
    group = config.at("group");
  }

  static constexpr std::array<std::string_view, 4> schedulers{"single", "static", "dynamic",
                                                              "paired"};
  void schedule(std::int64_t index) {
    scheduler = static_cast<Scheduler>(index);
    dynamic = scheduler == Scheduler::dynamic;
    paired = scheduler == Scheduler::paired;
  }
  void pack(std::int64_t value) {
    packs_heads = value != 0;
    packed_heads = packs_heads ? static_cast<int>(heads_of_keys) : 1;
  }
  attention_sm90_plan plan(const attention_form& form) const {
    return attention_sm90_plan_of(form, v_dim, *this);
  }
  bool stays() const { return scheduler == Scheduler::stays || scheduler == Scheduler::dynamic; }
  /// Queries of a work tile. More heads than its rows are no variant, but its constraints are
  /// judged.
  std::int64_t queries() const {
    return std::int64_t{std::max(64 / packed_heads, 1)} * (split_keys ? 1 : mma_warpgroups);
  }
};

/// Whether some tiles see more keys than others.
bool has_unlike_tiles(const Layer& layer) {
  return layer.mask != Mask::none || layer.lengths || layer.layout == Layout::thd;
}

/// Registers of an MMA thread: accumulators of the scores and of the output, the probabilities that
/// are multiplied meanwhile, words of a mask, and addresses; and what is added up of divided keys.
int registers_needed(const attention_form& form, const Tile& config) {
  const attention_sm90_plan plan = config.plan(form);
  const int probabilities = config.bn / 4;
  const int mask = form.mask == attention_mask::packed ? config.bn / 16 + 12 : 0;
  const int others = config.split_keys ? 56 : config.chunk > 0 ? 40 : 32;
  return plan.score_registers + plan.out_registers + probabilities + mask + others;
}

/// Cycles until the last CTA is done, if each takes the longest tile that is left: `cycles` of the
/// tiles of a head, which `matrices` heads have each, the longest first.
double last_of_tiles(const std::vector<double>& cycles, std::int64_t matrices, std::int64_t ctas) {
  std::map<double, std::int64_t> done{{0, ctas}};  // CTAs by when they are
  for (const double own : cycles)
    for (std::int64_t left = matrices; left > 0;) {
      const auto first = done.begin();
      const auto [begin, idle] = *first;
      const std::int64_t taken = std::min(idle, left);
      first->second -= taken;
      if (taken == idle) done.erase(first);
      done[begin + own] += taken;
      left -= taken;
    }
  return done.rbegin()->first;
}

/// Cycles of all tiles: each SM has its share of them. A block of keys costs the MMAs and
/// exponentials of the warpgroups of an SM, and a fixed cost whatever its size.
double cycles_of_tiles(const Layer& layer, const DeviceFacts& facts, const attention_form& form,
                       const Tile& config) {
  const attention_sm90_plan plan = config.plan(form);
  const auto queries = static_cast<double>(usual_queries(layer));
  const auto keys = static_cast<double>(usual_keys(layer));
  // A tile computes the blocks up to its last query's key, the last of them whole.
  const double seen = keys_seen(layer, plan.bm);
  double blocks = seen < keys ? seen / config.bn + 0.5 : std::ceil(keys / config.bn);
  double most_blocks = std::ceil(std::min(keys, seen * 2) / config.bn);
  if (config.split_keys) {
    blocks = blocks / 2 + 0.25;
    most_blocks = std::ceil(most_blocks / 2);
  }
  // Measured: wide heads hide exponentials beneath their MMAs, heads of 64 do not.
  constexpr double flops_of_cycle = 4096, exponentials_of_cycle = 16;  // of an SM
  const double dim = static_cast<double>(layer.dim + layer.v_dim) / 2;
  const double pairs = 64.0 * config.bn * config.mma_warpgroups * config.ctas_per_sm;
  const double mma = pairs * 2 * (plan.score_steps * 16 + plan.out_columns) / flops_of_cycle;
  const double softmax = pairs / exponentials_of_cycle * std::min(1.0, 64 / dim);
  const int warpgroups = config.mma_warpgroups * config.ctas_per_sm;
  const double short_of_registers = std::max(0, config.bn - 128) * dim / 16;
  constexpr double fixed_alone = 1300;  // of a warpgroup that overlaps no other's MMAs
  // On an H200, causal, 2 x 4,096 tokens: 172, 206 and 262 us in three warpgroups at heads of 80,
  // 112 and 160 features, where two take 197, 221 and 279. At 128 searches choose two.
  const double of_three = config.mma_warpgroups < 3 || layer.dim <= 64 ? 0
                          : plan.out_columns == 128                    ? 300
                                                                       : -350;
  const double fixed = (warpgroups == 1 ? fixed_alone : 600) + (config.ordered ? 0 : 40) +
                       // With divided keys a warpgroup has half of the stages.
                       (config.stages > 2   ? 0
                        : config.split_keys ? 800
                                            : 30) +
                       (warpgroups == 2 && layer.dim <= 64 ? 300 : 0) + short_of_registers +
                       of_three;
  // Measured: pages of 16 keys come at no more than 34 bytes a cycle.
  constexpr double paged_bytes_of_cycle = 34;
  const double copies =
      layer.page > 0 ? 1.0 * (plan.kv_bytes + plan.value_bytes) * config.ctas_per_sm : 0;
  // Measured at heads of 136 and 200 features, whose rows begin within a sector.
  constexpr double cycles_of_part = 3.6;  // 64 bytes of a row
  const double parts = plan.head_boxes && plan.slab_columns == 32
                           ? 2.0 * config.bn * plan.slabs * config.ctas_per_sm
                           : 0;
  const double of_block =
      std::max({mma + softmax + fixed, copies / paged_bytes_of_cycle, cycles_of_part * parts});
  const auto tiles = static_cast<double>(quotient_up(usual_queries(layer), plan.bm) * layer.b *
                                         layer.heads / config.packed_heads);
  const double share = tiles / static_cast<double>(facts.multiprocessors * config.ctas_per_sm);
  // Its queries, its last product, and the store: CTAs that stay overlap them with the next tile.
  const double of_tile = (share > 1 && config.scheduler == Scheduler::single ? 2500 : 1500) +
                         (config.split_keys ? 2100 : 0) +
                         // With a single tile per CTA, the first loads wait for those of all
                         // stages.
                         (share > 1 ? 0 : 350 * config.stages);
  const double tile_cycles = blocks * of_block + of_tile;
  // In one round the longest tile counts. Unlike tiles, the longest first, even out in several but
  // for the last, as do those of CTAs that share an SM.
  const bool evens_out = layer.mask == Mask::causal || config.ctas_per_sm > 1;
  if (config.divided) {
    constexpr double of_sums = 4000;  // the second kernel
    const auto ctas = static_cast<double>(facts.multiprocessors * config.ctas_per_sm);
    const double items = tiles * std::ceil(keys / config.chunk);
    const double blocks_of_item = std::ceil(std::min<double>(keys, config.chunk) / config.bn);
    return std::ceil(items / ctas) * (blocks_of_item * of_block + of_tile) + of_sums;
  }
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
  return all;
}

/// Cycles of the launch.
double cycles(const Layer& layer, const DeviceFacts& facts, const attention_form& form,
              const Tile& config) {
  constexpr double of_launch = 6000;
  const double sharing = config.ctas_per_sm > 1 ? 1.15 : 1;  // of one SM's shared memory
  // Fixed turns that pass from heads to others do not even out unlike tiles: up to 1.6 times.
  const bool unlike = has_unlike_tiles(layer);
  const bool unbalanced = unlike && config.scheduler == Scheduler::stays;
  const double balance = !unbalanced ? 1 : config.group < kv_matrices(layer) ? 1.2 : 1.03;
  // Unlike tiles even out among the tiles of many heads. With tiles of equal length, the SMs
  // process a few heads at a time in any order, and the fewer keys and values these read the
  // better.
  const double best_group = unlike ? static_cast<double>(usual_group(layer, facts)) : 1;
  const double locality =
      1 + (unlike ? 0.001 : 0.003) *
              std::abs(std::log2(static_cast<double>(config.group) / best_group));
  if (config.tile_cycles == unknown)
    config.tile_cycles = cycles_of_tiles(layer, facts, form, config);
  return packing_factor(layer, config) * locality * balance * sharing * config.tile_cycles +
         of_launch + copy_cycles(layer, facts);
}

/// Keys of a block. They and split_keys decide the order of a row's sums: if that is to be fixed,
/// blocks suit every page, and fit for every number of queries.
std::vector<std::int64_t> blocks_of_keys(const Layer& layer) {
  if (!layer.batch_invariant) return {64, 80, 96, 112, 128, 160, 176, 192, 224};
  return {layer.dim <= 128 ? 128 : 64};
}

using Tiles = TypedSpace<Tile>;

template <auto field>
void set(Tile& tile, std::int64_t value) {
  Tiles::to<field>(tile, value);
  tile.tile_cycles = unknown;
}

struct Model {
  static constexpr std::string_view name = "attention_sm90";
  static Tiles tiles(const Layer& layer, const DeviceFacts& facts);
  static Tile tile(const Layer& layer, const Config& config) { return Tile(layer, config); }
  static constexpr auto cycles = attention::cycles;
};
using Search = TileSearch<Model>;

Tiles parameters_of(const Layer& layer, const DeviceFacts& facts) {
  Tiles space{Tile(layer)};
  space
      .parameter("mma_warpgroups", "MMA warpgroups of a CTA, of 64 queries each",
                 set<&Tile::mma_warpgroups>, {1, 2, 3})
      .parameter("bn", "keys of a block", set<&Tile::bn>, blocks_of_keys(layer))
      .parameter("stages", "blocks of keys, and as many of values, in shared memory",
                 set<&Tile::stages>, {2, 3, 4})
      .parameter("ordered",
                 "1: MMA warpgroups issue their MMAs in turn, so that the softmax of one overlaps "
                 "the MMAs of the others; 0: in no fixed order",
                 set<&Tile::ordered>, {0, 1})
      .parameter("ctas_per_sm", "CTAs that share an SM", set<&Tile::ctas_per_sm>, {1, 2})
      .words("scheduler",
             "single: one CTA for each tile; paired: one CTA for two tiles of 64 queries, one as "
             "far from the first query as the other from the last; static: persistent CTAs with a "
             "fixed order of tiles; dynamic: persistent CTAs that take tiles from a counter",
             [](Tile& tile, std::int64_t index) {
               tile.schedule(index);
               tile.tile_cycles = unknown;
             },
             {Tile::schedulers.begin(), Tile::schedulers.end()})
      .parameter(
          "split_keys",
          "1: two MMA warpgroups have the same queries and divide the keys; 0: each has its own",
          set<&Tile::split_keys>,
          layer.batch_invariant ? std::vector<std::int64_t>{0} : std::vector<std::int64_t>{0, 1})
      .when_absent(0)
      .parameter("divided",
                 "1: chunks of a row's keys are work items, and a second kernel adds them up; 0: a "
                 "CTA has all keys of its queries",
                 set<&Tile::divided>,
                 chunk_of(layer) > 0 && layer.layout == Layout::bshd
                     ? std::vector<std::int64_t>{0, 1}
                     : std::vector<std::int64_t>{0})
      .when_absent(0)
      .parameter("pack_heads",
                 "1: a tile has the queries of all heads that share keys; 0: those of one head",
                 [](Tile& tile, std::int64_t value) {
                   tile.pack(value);
                   tile.tile_cycles = unknown;
                 },
                 {0, 1})
      .when_absent(0)
      .parameter("group", "heads of k and v whose tiles are scheduled together",
                 Tiles::to<&Tile::group>, {1, 2, 4, 8, 16, 32, 64, 128})
      .when_absent_by([layer, facts] { return Search::default_config(layer, facts).at("group"); });
  return space;
}

/// Constraints of single parameters by the layer, and of parameters by each other.
void add_layer_constraints(Tiles& space, const Layer& layer, const DeviceFacts& facts,
                           const attention_form& form) {
  space.constraint(
      "the keys and values of a group's heads must fit in L2, and the group must have all heads if "
      "theirs fit",
      {"group"},
      [usual = usual_group(layer, facts), all = heads_in_l2(layer, facts) >= kv_matrices(layer)](
          const Tile& t) { return all ? t.group == usual : t.group <= 2 * usual; });
  space.constraint("ordered=1 needs mma_warpgroups of 2 or more, which issue their MMAs in turn",
                   {"mma_warpgroups", "ordered"},
                   [](const Tile& t) { return t.mma_warpgroups > 1 || !t.ordered; });
  space.constraint("ctas_per_sm=2 needs mma_warpgroups=1: the registers of an SM hold no more",
                   {"mma_warpgroups", "ctas_per_sm"},
                   [](const Tile& t) { return t.ctas_per_sm == 1 || t.mma_warpgroups == 1; });
  const bool may_split = layer.dim <= 128 && form.mask != attention_mask::packed &&
                         query_tiles(layer, 128) < 2 * facts.multiprocessors && layer.kv > 64;
  space.constraint(
      "split_keys=1 needs mma_warpgroups=2, an even number of stages, heads of up to 128 features, "
      "more than 64 keys, few tiles, and no packed mask",
      {"mma_warpgroups", "stages", "split_keys"}, [may_split](const Tile& t) {
        return !t.split_keys || (t.mma_warpgroups == 2 && t.stages % 2 == 0 && may_split);
      });
  const int chunk = chunk_of(layer);
  const bool may_divide =
      query_tiles(layer, 64, layer.heads / layer.kv_heads) <= 2 * facts.multiprocessors &&
      chunk > 0 && layer.kv > chunk && bytes_of_chunks(layer, chunk) <= most_bytes_of_chunks;
  space.constraint(
      "divided=1 needs scheduler=single, few tiles, more keys than one chunk, and at most 256 MiB "
      "for the sums of all chunks",
      {"scheduler", "divided"}, [may_divide](const Tile& t) {
        return !t.divided || (t.scheduler == Scheduler::single && may_divide);
      });
  space.constraint("scheduler=paired has no sums for chunks of keys, which batch invariance needs",
                   {"scheduler"}, [](const Tile& t) { return t.chunk == 0 || !t.paired; });
  space.constraint("with a packed mask bn is 64 or 128: one or two of the mask's tiles", {"bn"},
                   [packed = form.mask == attention_mask::packed](const Tile& t) {
                     return !packed || t.bn == 64 || t.bn == 128;
                   });
  space.constraint("bn must divide the page size or be a multiple of it", {"bn"},
                   [page = layer.page](const Tile& t) {
                     return page == 0 || t.bn % page == 0 || page % t.bn == 0;
                   });
  space.constraint("fewer than 64 keys of a block may be padding", {"bn"},
                   [kv = layer.kv, any = layer.batch_invariant](const Tile& t) {
                     return t.bn == 64 || t.bn < kv + 64 || any;
                   });
  space.constraint("every MMA warpgroup of a CTA needs queries of its own",
                   {"mma_warpgroups", "split_keys", "pack_heads"},
                   [s = layer.s](const Tile& t) { return t.queries() < s + 64; });
  space.constraint(
      "pack_heads=1 needs 2 to 64 heads of q for each head of k, rows of q that are whole heads, "
      "and no packed mask",
      {"pack_heads"},
      [may_pack = may_pack_heads(layer)](const Tile& t) { return !t.packs_heads || may_pack; });
}

void add_resource_constraints(Tiles& space, const DeviceFacts& facts, const attention_form& form) {
  const Tiles::Names shape{"mma_warpgroups", "bn",         "stages",  "ordered",   "ctas_per_sm",
                           "scheduler",      "split_keys", "divided", "pack_heads"};
  space.constraint("scores, probabilities and output must fit in an MMA thread's registers", shape,
                   [form](const Tile& t) {
                     const int have = t.plan(form).mma_registers;
                     // The smallest blocks always fit, some of them barely.
                     return (t.bn == 64 && t.mma_warpgroups < 3) ||
                            registers_needed(form, t) <= have;
                   });
  space.constraint("queries and the stages of keys and values must fit in shared memory", shape,
                   [form, facts](const Tile& t) {
                     return fits_shared_memory(facts, t.plan(form).shared_bytes, t.ctas_per_sm);
                   });
}

void add_scheduler_constraints(Tiles& space, const Layer& layer, const DeviceFacts& facts) {
  space.constraint(
      "scheduler=dynamic is for tiles that differ in length", {"scheduler"},
      [unlike = has_unlike_tiles(layer)](const Tile& t) { return !t.dynamic || unlike; });
  const bool may_pair = layer.mask == Mask::causal && layer.window == 0 && layer.s > 64 &&
                        query_tiles(layer, 128) <= facts.multiprocessors;
  space.constraint(
      "scheduler=paired needs a causal mask without a window, more than 64 queries, at most one "
      "tile for each SM, mma_warpgroups=2, ordered=0, split_keys=0 and pack_heads=0",
      {"mma_warpgroups", "ordered", "scheduler", "split_keys", "pack_heads"},
      [may_pair](const Tile& t) {
        return !t.paired ||
               (t.mma_warpgroups == 2 && !t.ordered && !t.split_keys && !t.packs_heads && may_pair);
      });
  space.constraint("the tile counter of scheduler=dynamic has 24 bits", {"scheduler"},
                   [few = query_tiles(layer, 64) < attention_tile_counter::most_tiles](
                       const Tile& t) { return !t.dynamic || few; });
  space.constraint(
      "persistent CTAs (scheduler=static or dynamic) need more tiles than there are CTAs",
      {"mma_warpgroups", "ctas_per_sm", "scheduler", "split_keys", "pack_heads"},
      [layer, processors = facts.multiprocessors](const Tile& t) {
        return !t.stays() ||
               query_tiles(layer, t.queries(), t.packed_heads) > processors * t.ctas_per_sm;
      });
}

Tiles Model::tiles(const Layer& layer, const DeviceFacts& facts) {
  const attention_form form = form_of(layer);
  Tiles space = parameters_of(layer, facts);
  add_layer_constraints(space, layer, facts, form);
  add_resource_constraints(space, facts, form);
  add_scheduler_constraints(space, layer, facts);
  return space;
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& values) {
  const Layer layer = layer_of(problem);
  const Tile config(layer, values);
  const std::int64_t most_ctas = facts.multiprocessors * std::int64_t{config.ctas_per_sm};
  return forward_program(problem, facts, "attention_forward_sm90", config,
                         config.plan(form_of(layer)), config.group,
                         config.stays() || config.divided ? most_ctas : 0);
}

std::string template_argument(const attention_sm90_config& config) {
  StructText text("attention_sm90_config");
  text.set("mma_warpgroups", config.mma_warpgroups, "bn", config.bn, "stages", config.stages,
           "ordered", config.ordered, "ctas_per_sm", config.ctas_per_sm, "dynamic", config.dynamic,
           "split_keys", config.split_keys, "paired", config.paired, "packed_heads",
           config.packed_heads);
  if (config.chunk != 0) text.set("chunk", config.chunk, "divided", config.divided);
  return text;
}

void set_tensor_maps(Program& program, Launch& launch, const DeviceFacts& facts,
                     const attention_sm90_plan& plan, const attention_sm90_config& config) {
  const HeadTensors tensors = head_tensors(program, launch, facts);
  const Layer& layer = tensors.layer;
  const auto map = [&](const Pointer& tensor, std::int64_t row, bool of_keys, int tokens,
                       int columns, int heads) {
    return plan.head_boxes || heads > 1
               ? heads_map(layer, tensor, row, of_keys, tokens, columns, heads)
               : rows_map(layer, tensor, row, of_keys, tokens, columns);
  };
  using Params = attention_sm90_params;
  launch.fields<Params>().set(
      &Params::q,
      map(tensors.q, layer.q_row, false, plan.part_queries, plan.slab_columns, config.packed_heads),
      &Params::k, map(tensors.k, layer.k_row, true, config.bn, plan.slab_columns, 1), &Params::v,
      map(tensors.v, layer.v_row, true, config.bn, plan.value_slab_columns, 1));
  if (layer.kv_head != launch.layer().kv_head)
    launch.attention().set(&attention_params::kv_head, layer.kv_head);
}

}  // namespace

std::int64_t usual_group(const Layer& layer, const DeviceFacts& facts) {
  const std::int64_t matrices = kv_matrices(layer), fit = heads_in_l2(layer, facts);
  std::int64_t group = 1;
  while (group < 128 && (fit >= matrices ? group < matrices : 2 * group <= fit)) group *= 2;
  return group;
}

Program forward_program(const Problem& problem, const DeviceFacts& facts, std::string_view kernel,
                        const attention_sm90_config& config, const attention_sm90_plan& plan,
                        std::int64_t group, std::int64_t most_ctas) {
  Program program;
  Launch launch(program, problem, facts, sizeof(attention_sm90_params),
                offsetof(attention_sm90_params, attention));
  const Layer& layer = launch.layer();
  launch.set_group(group, config.packed_heads);
  set_tensor_maps(program, launch, facts, plan, config);
  if (config.dynamic)
    launch.fields<attention_sm90_params>().set(&attention_sm90_params::next_tile,
                                               launch.scratch(8));
  std::int64_t ctas = query_tiles(layer, plan.bm, config.packed_heads);
  if (config.divided) {
    ctas *= quotient_up(layer.kv, config.chunk);
    launch.attention().set(&attention_params::partials,
                           launch.scratch(bytes_of_chunks(layer, config.chunk)));
  }
  if (most_ctas > 0) ctas = std::min(ctas, most_ctas);
  const auto append = [&](std::string_view name, std::int64_t blocks, int threads, int shared) {
    launch.append(file, kernel_of(layer, name, template_argument(config)),
                  {static_cast<std::uint32_t>(blocks), 1, 1}, threads, shared);
  };
  append(kernel, ctas, plan.threads, plan.shared_bytes);
  if (config.divided)
    append("attention_chunk_sums_sm90", quotient_up(layer.q_tokens() * layer.heads, 4), 128, 0);
  return program;
}

std::int64_t bytes_of_chunks(const Layer& layer, std::int64_t chunk) {
  return 4 * quotient_up(layer.kv, chunk) * layer.q_tokens() * layer.heads *
         attention_chunk_row(form_of(layer));
}

double keys_seen(const Layer& layer, int bm) {
  const auto queries = static_cast<double>(usual_queries(layer));
  const auto keys = static_cast<double>(usual_keys(layer));
  double seen = keys;
  if (layer.mask == Mask::causal)
    seen = std::min(keys, keys - std::min(queries, keys) / 2 + bm / 2.0);
  if (layer.window > 0) seen = std::min(seen, static_cast<double>(layer.window + bm));
  return seen;
}

bool may_pack_heads(const Layer& layer) {
  return layer.group() > 1 && layer.group() <= 64 &&
         (layer.q_row % layer.dim == 0 || copies_heads(layer)) &&
         form_of(layer).mask != attention_mask::packed;
}

double packing_factor(const Layer& layer, const attention_sm90_config& config) {
  return config.packed_heads == 1 ? 1 : layer.page > 0 ? 1.01 : 1.1;
}

std::optional<std::string> refuse_tma(const Layer& layer, const DeviceFacts& facts) {
  if (facts.compute_capability != 90)
    return fmt::format("wgmma is an instruction of compute capability 9.0 alone: {} has {}.{}",
                       facts.name, facts.compute_capability / 10, facts.compute_capability % 10);
  if (layer.dtype == DType::f32) return "wgmma multiplies bf16 and fp16, not f32";
  if (layer.v_dim != layer.dim && (layer.dim % 16 != 0 || layer.v_dim % 8 != 0))
    return fmt::format("v-dim={} is not dim={}: then they must be multiples of 8 and of 16",
                       layer.v_dim, layer.dim);
  if (auto reason = refuse_e4m3(layer)) return reason;
  if (layer.page > 0 && copies_heads(layer))
    return fmt::format("TMA cannot address heads of dim={} in pages, which are not copied",
                       layer.dim);
  if (!copies_heads(layer) && layer.dim % 16 != 0)
    for (const std::int64_t row : {layer.q_row, layer.k_row, layer.v_row})
      if (row % layer.dim != 0)
        return fmt::format("rows of {} elements are not whole heads of dim={}, as boxes of TMA are",
                           row, layer.dim);
  return misaligned_rows(layer);
}

std::optional<std::string> refuse_sm90(const Layer& layer, const DeviceFacts& facts) {
  for (const std::int64_t dim : {layer.dim, layer.v_dim})
    if (dim > most_narrow_dim)
      return fmt::format("{}={} is above {}, the columns of a wgmma",
                         dim == layer.dim ? "dim" : "v-dim", dim, most_narrow_dim);
  if (layer.backward)
    if (auto reason = refuse_other_values(layer)) return reason;
  constexpr std::int64_t few_queries = 64;
  if (!layer.backward && copies_heads(layer) && layer.s <= few_queries && !layer.batch_invariant)
    return fmt::format("TMA cannot address heads of dim={}, and s={} are too few to copy keys for",
                       layer.dim, layer.s);
  return refuse_tma(layer, facts);
}

std::optional<std::string> refuse_beside_sm90(const Layer& layer, const DeviceFacts& facts) {
  constexpr std::int64_t most_queries = 64;
  if (refuse_sm90(layer, facts) && (layer.backward || refuse_wide_sm90(layer, facts)))
    return std::nullopt;
  if (layer.batch_invariant) return std::string(order_depends_on_rows);
  if (layer.s <= most_queries) return std::nullopt;
  return fmt::format("s={}: wgmma serves this problem, and is faster from {} queries on", layer.s,
                     most_queries);
}

constinit const Engine sm90_engine{.name = Model::name,
                                   .summary = "TMA and wgmma, MMA warpgroups in turn",
                                   .can_implement = refuse_sm90,
                                   .search = Search::side,
                                   .program = program,
                                   .batch_invariant = true,
                                   .sources = {file, copy_heads_source}};

}  // namespace fftune::attention
