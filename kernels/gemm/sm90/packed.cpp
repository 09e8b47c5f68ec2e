// The sm_90a engine for packed weights: can_implement, its space, its cost model, and how its
// kernel (packed.cu) is launched.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/least_cost.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "kernels/gemm/sm90/packed_config.cuh"

namespace fftune {
namespace {

/// A product as the space and the cost model see it.
struct Product : GemmSize {
  int operands;
  bool grouped;
  packed_form format;
  double used_groups = 1;  // that usually have rows
  double usual_rows;       // of a group that has some
  /// Tiles of a group's usual rows: all of them, and those with more rows than half of a tile.
  struct GroupTiles {
    double all = 0, full = 0;
  };
  static constexpr int most_height = 256;
  std::array<GroupTiles, most_height / 8 + 1> group_tiles;  // of tiles of 8 * i rows, but [0]

  explicit Product(const GemmProblem& gemm)
      : GemmSize(gemm),
        operands(gemm.b_operands()),
        grouped(gemm.groups.any()),
        format(packed_form_of(gemm)) {
    if (grouped) used_groups = std::max(gemm.groups.with_rows(), 1.0);
    usual_rows = std::max(1.0, static_cast<double>(m) / used_groups);
    if (grouped) count_group_tiles();
  }

 private:
  void count_group_tiles() {
    // The rows of a group are about a normal distribution's, with their mean as the variance: tile
    // number i is there with the probability of more than i * height rows. The first ones are sure.
    const double deviation = std::sqrt(usual_rows);
    const auto more_than = [&](int count) {
      return count == 0 ? 1
                        : 0.5 * std::erfc((count + 0.5 - usual_rows) / (deviation * std::sqrt(2)));
    };
    for (int height = 8; height <= most_height; height += 8) {
      const int half = sm90_packed_config::half_columns(height);
      int tile = std::max(0, static_cast<int>((usual_rows - 6 * deviation) / height) - 1);
      GroupTiles& of = group_tiles[static_cast<std::size_t>(height / 8)];
      of = {static_cast<double>(tile), static_cast<double>(tile)};
      for (double more = 1; more > 0.001; more = more_than(++tile * height)) {
        of.all += more;
        of.full += more_than(tile * height + half);
      }
    }
  }
};

struct Tile : sm90_packed_config {
  Tile() = default;
  explicit Tile(const Config& config)
      : sm90_packed_config{.tokens = config.get("tokens"),
                           .tiles = config.get("tiles"),
                           .row_groups = config.get("row_groups"),
                           .k_groups = config.get("k_groups"),
                           .k_blocks = config.get("k_blocks"),
                           .ctas = config.get("ctas"),
                           .split_k = config.get("split_k")} {}

  std::int64_t row_blocks(std::int64_t n) const { return ceil_div(n, rows()); }
  /// The usual number, where rows have groups.
  std::int64_t token_tiles(const Product& product) const {
    if (!product.grouped) return ceil_div(product.m, tokens);
    return std::max<std::int64_t>(1,
                                  std::llround(product.used_groups * tiles_of_group(product, 1)));
  }
  /// Tiles of one group's rows, where one of few rows counts as `few` of a whole one.
  double tiles_of_group(const Product& product, double few) const {
    const Product::GroupTiles& of = product.group_tiles[static_cast<std::size_t>(tokens / 8)];
    const bool halves = few_columns(product.operands, product.format, product.grouped) < tokens;
    return few * of.all + (1 - few) * (halves ? of.full : of.all);
  }
  /// The mean time of a tile's MMAs, of that of a whole tile's. With half of the columns they wait
  /// for operands a little more.
  double whole_share(const Product& product) const {
    return product.grouped ? tiles_of_group(product, 0.55) / tiles_of_group(product, 1) : 1;
  }
  std::int64_t tiles_of(const Product& product) const {
    return row_blocks(product.n) * token_tiles(product);
  }
  /// Whether CTAs take several tiles.
  bool takes_several(const Product& product) const {
    return persistent(product.operands, product.format, product.grouped);
  }
};

/// Columns of the MMAs: up to 32 tokens the least of few numbers that all of them need, so that few
/// kernels serve all. More tokens have tiles of most multiples of 16, which fit them and the waves
/// of CTAs. Groups have those that the usual numbers of their rows fill by a quarter or more.
std::vector<std::int64_t> token_choices(const Product& product) {
  std::vector<std::int64_t> choices;
  if (product.grouped) {
    for (std::int64_t tokens = 8; tokens <= Product::most_height; tokens += 8)
      if ((tokens <= 152 || tokens % 64 == 0) &&
          (tokens == 8 || static_cast<double>(tokens) < 4 * product.usual_rows))
        choices.push_back(tokens);
    return choices;
  }
  for (const std::int64_t tokens : {8, 16, 32})
    if (product.m <= tokens) return {tokens};
  choices = {32, 64};
  if (product.m <= 48) choices.push_back(48);
  if (product.m <= 64) return choices;
  for (std::int64_t tokens = 80; tokens <= Product::most_height; tokens += 16)
    choices.push_back(tokens);
  return choices;
}

std::optional<std::string> can_implement(const GemmChain& chain, const DeviceFacts& facts) {
  const GemmProblem& gemm = chain.front();
  if (gemm.packed.empty()) return "it reads packed weights: give weights=" + packed_names();
  if (auto reason = refuse_packed_groups(gemm)) return reason;
  if (facts.compute_capability != 90)
    return fmt::format("wgmma is an instruction of compute capability 9.0 alone: {} has {}.{}",
                       facts.name, facts.compute_capability / 10, facts.compute_capability % 10);
  if (gemm.dtype != DType::bf16 && gemm.dtype != DType::fp16)
    return fmt::format("wgmma multiplies bf16 and fp16, not {}", dtype_name(gemm.dtype));
  if (gemm.epilogue.kind != EpilogueKind::linear && gemm.epilogue.kind != EpilogueKind::gated)
    return "it has a linear or a gated epilogue";
  return misaligned_rows(gemm);
}

TypedSpace<Tile> tiles_of(const Product& product, const DeviceFacts& facts) {
  using Tiles = TypedSpace<Tile>;
  Tiles space{Tile()};
  space
      .parameter("tokens", "tokens of a CTA: columns of the MMAs", Tiles::to<&Tile::tokens>,
                 token_choices(product))
      .parameter("tiles", "tiles of 64 rows of each weight that a warpgroup takes",
                 Tiles::to<&Tile::tiles>, {1, 2})
      .parameter("row_groups", "warpgroups of a CTA that take other rows",
                 Tiles::to<&Tile::row_groups>, {1, 2, 3, 4})
      .parameter("k_groups", "warpgroups of a CTA that take turns at the stages",
                 Tiles::to<&Tile::k_groups>, {1, 2, 4})
      .parameter("k_blocks", "blocks of 64 of k of a stage", Tiles::to<&Tile::k_blocks>, {1, 2, 4})
      .parameter("ctas", "CTAs that share an SM", Tiles::to<&Tile::ctas>, {1, 2, 3})
      .parameter("split_k", "CTAs of a cluster that share k", Tiles::to<&Tile::split_k>,
                 {1, 2, 3, 4, 5, 6, 7, max_split_k});
  const int operands = product.operands;
  const packed_form format = product.format;
  space.constraint("a CTA has at most 4 MMA warpgroups, and an SM 8: more have too few registers",
                   {"row_groups", "k_groups", "ctas"}, [](const Tile& t) {
                     return t.mma_warpgroups() <= 4 && t.mma_warpgroups() * t.ctas <= 8;
                   });
  const Tiles::Names registers{"tokens", "tiles", "row_groups", "k_groups", "k_blocks", "ctas"};
  space.constraint("accumulators, operands and codes must fit in a thread's registers", registers,
                   [=](const Tile& t) {
                     // ptxas wants an MMA's accumulators to fit at launch, too.
                     return t.registers(operands, format) <= t.mma_registers() &&
                            t.tokens / 2 + 16 <= t.launch_registers();
                   });
  space.constraint(
      "at least three stages, and the accumulators that split-K exchanges, must fit in shared "
      "memory",
      {"tokens", "tiles", "row_groups", "k_groups", "k_blocks", "ctas", "split_k"},
      [=](const Tile& t) {
        return t.stages(operands, format) >= 3 &&
               t.shared_bytes(operands, format) <= t.most_shared();
      });
  space.constraint("every warpgroup needs at least one stage of k",
                   {"k_groups", "k_blocks", "split_k"}, [k = product.k](const Tile& t) {
                     return (t.k_groups == 1 && t.k_blocks == 1 && t.split_k == 1) ||
                            k > std::int64_t{packed_k} * t.k_blocks * (t.k_groups * t.split_k - 1);
                   });
  space.constraint("more than half of the rows would be padding", {"tiles", "row_groups"},
                   [n = product.n](const Tile& t) { return t.rows() == 64 || t.rows() < 2 * n; });
  space.constraint("more than half of the tokens would be padding", {"tokens"},
                   [product](const Tile& t) {
                     return product.grouped || product.m <= 64 || t.tokens < 2 * product.m;
                   });
  space.constraint("split-K pays only for fewer tiles than SMs",
                   {"tokens", "tiles", "row_groups", "split_k"},
                   [product, processors = facts.multiprocessors](const Tile& t) {
                     return t.split_k == 1 || t.tiles_of(product) < processors;
                   });
  return space;
}

Space space(const GemmChain& chain, const DeviceFacts& facts) {
  return tiles_of(Product(chain.front()), facts).space();
}

/// SMs that clusters of `split_k` CTAs fill: a cluster lies within one GPC, and GPCs have unlike
/// numbers of SMs. 32 clusters of four, one CTA an SM, took two waves on an H100.
double usable_processors(const Tile& tile, const DeviceFacts& facts) {
  const double processors = std::max(facts.multiprocessors, 1);
  if (tile.split_k <= 2) return processors;
  return std::max(1.0, std::floor(0.91 * processors / tile.split_k)) * tile.split_k;
}

/// About the longest of several times that overlap.
double overlapped(std::initializer_list<double> times) {
  double sum = 0;
  for (const double time : times) sum += time * time * time;
  return std::cbrt(sum);
}

/// Microseconds of a launch by the cost model: memory, L2 and the stages of the busiest SM overlap;
/// starts of waves and the reduction of split K do not. The constants are fitted to 226 variants of
/// eight problems that an H100 timed, with a deviation of 10%, and those of more than 64 tokens to
/// 17 of four, with 5%.
double microseconds(const Tile& tile, const Product& product, const DeviceFacts& facts) {
  const packed_form& format = product.format;
  const int operands = product.operands;
  const double clocks = 0.886e-6 * (facts.clock_hz > 0 ? facts.clock_hz : 1.98e9);
  const double bandwidth =
      0.934e-6 * (facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 3.35e12);
  const auto blocks = static_cast<double>(tile.tiles_of(product) * tile.split_k);
  // CTAs that the busiest SM has, at a time and in all.
  const double each = std::ceil(blocks / usable_processors(tile, facts));
  const double resident = std::min<double>(each, tile.ctas);
  const double waves = std::ceil(each / tile.ctas);
  const double stages = std::ceil(static_cast<double>(product.k) / (packed_k * tile.k_blocks));
  const double visits = each * std::ceil(stages / tile.split_k);  // stages of the busiest SM
  const double stage_bytes = tile.copied_bytes(operands, format);

  const double weights = (stage_bytes - tile.token_bytes()) * stages *
                         static_cast<double>(tile.row_blocks(product.n)) * product.used_groups;
  constexpr double latency_us = 0.24;
  const double memory = std::max(weights / bandwidth,
                                 visits / (resident * tile.stages(operands, format)) * latency_us);
  const double l2 = visits * stage_bytes / (64 * clocks);

  // An MMA has 64 rows and 16 of k; each of a warpgroup's warps expands a word a lane for it.
  const double of_warpgroup = tile.units(operands) * tile.k_blocks * 4.0;  // MMAs of a stage
  const double mmas = of_warpgroup * tile.row_groups;
  const bool separate = format.group != 0 && !tile.scales_operands(operands, format);
  // Two MMAs of a warpgroup begin together, after a wait.
  const double tensor =
      tile.tokens > 64 ? tile.tokens / 2.0 + 6.5 : 1.05 * std::max(tile.tokens / 2.0, 17.6);
  const int run = std::min(format.group, packed_k * tile.k_blocks);
  // The operation that makes numbers of codes takes a scale too, but none of nvfp4, which is
  // multiplied besides.
  const double of_scaling = format.scales_rows() ? 37 : 28;
  const double issue = tile.scales_operands(operands, format) ? of_scaling
                       : separate                             ? tile.tokens * 32.0 / run
                                                              : 0;
  // A warpgroup's stage by itself: accumulators of a group of k wait for its MMAs. Experts in mxfp4
  // do so too: with two row groups of 64 tokens gpt-oss' took 596 us, and with three 586.
  const bool in_turns = separate || product.grouped;
  const double alone = of_warpgroup * (in_turns ? tensor + issue : std::max(tensor, issue));
  const double warpgroups = tile.k_groups * resident;  // that work on the same rows' stages
  const double loads =
      tile.k_blocks +
      operands * (tile.stage_parts(format) / tile.box_parts(format) + (format.group == 0 ? 0
                                                                       : format.zeros    ? 2
                                                                                         : 1));
  const double stage =
      overlapped({mmas * tensor, mmas * issue, alone / warpgroups, 31.0 * loads}) + 37;
  // Two tiles of a warpgroup take its registers in turns.
  const double compute =
      visits * stage * tile.whole_share(product) * (tile.tiles == 2 ? 1.06 : 1) / clocks;

  double split = 0;
  if (tile.split_k > 1) {
    const double kib = each * tile.rows() * tile.tokens * operands * 4.0 / 1024;  // accumulators
    split = waves * 0.24 * tile.split_k + 0.048 * kib * (tile.split_k - 1) / tile.split_k;
  }
  const double starts =
      tile.takes_several(product) ? 3.7 + 1.5 * (waves - 1) : 3.7 * waves;  // and ends
  // Since the fit, a stage's tokens follow its weights instead of those of all stages, so the first
  // MMAs of few tokens begin earlier: 1.8 to 2.6 us for weights of less than 30 MB.
  // Weights of less than 4 MB hide more of the start.
  const double small = std::max(0.0, 1 - weights / bandwidth / 1.4);
  const double earlier = product.grouped || tile.tokens > 64 ? 0 : 2.5 + 0.5 * small;
  return overlapped({memory, l2, compute}) + 1.6 + starts - earlier + split +
         0.1 * (tile.k_groups - 1);
}

std::optional<double> estimate(const GemmChain& chain, const DeviceFacts& facts,
                               const Config& config) {
  return 1e-6 * microseconds(Tile(config), Product(chain.front()), facts);
}

Config default_config(const GemmChain& chain, const DeviceFacts& facts) {
  const Product product(chain.front());
  return least_cost(tiles_of(product, facts), "packed_sm90",
                    [&](const Tile& tile) { return microseconds(tile, product, facts); });
}

/// For up to 8 tokens the kernel without shared memory for weights may be faster, as its blocks
/// are smaller. Groups have few rows each. In a layer their launches follow others, and those of
/// the other kernel begin later than alone. With 16 tokens an H200 took 166 us for a layer of
/// gpt-oss-20b by this one, and 178 with `down` by the other, although both are as fast alone.
bool is_preferred(const GemmChain& chain, const DeviceFacts& facts) {
  const Engine& decode = packed_decode_engine;
  if ((chain.front().m > 8 && !chain.front().groups.any()) || decode.can_implement(chain, facts))
    return true;
  const auto untuned = [&](const Engine& engine) {
    return *engine.search.estimate(chain, facts, engine.search.default_config(chain, facts));
  };
  const bool several_tokens = chain.front().groups.any() && chain.front().m >= 32;
  return untuned(packed_sm90_engine) <= (several_tokens ? 1.1 : 1.0) * untuned(decode);
}

/// A, or a copy of its rows in the order of their groups: TMA loads no scattered rows.
Pointer sorted_rows(Program& program, const GemmProblem& gemm, const TensorPlaces& places,
                    const DeviceFacts& facts) {
  const TensorArgument a = tensor_of(places, gemm.a.front().front());
  if (!gemm.groups.any() || gemm.a_sorted) return a;
  const ScratchArgument sorted{program.scratch.size()};
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(gemm.dtype));
  program.scratch.push_back({static_cast<std::size_t>(gemm.m * gemm.k * bytes), false});
  KernelLaunch& launch = append_permute_rows(program, gemm, places, facts, gemm.m);
  launch.arguments.insert(
      launch.arguments.end(),
      {a, sorted, static_cast<std::int32_t>(gemm.k * bytes / 16), std::int64_t{0}, std::int64_t{0},
       std::int32_t{0}, static_cast<std::int32_t>(gemm.m)});
  return sorted;
}

void append(Program& program, const GemmChain& chain, const TensorPlaces& places,
            const DeviceFacts& facts, const Config& config) {
  const GemmProblem& gemm = chain.front();
  const Tile tile(config);
  const Product product(gemm);
  const packed_form& format = product.format;
  const int operands = product.operands;
  using Params = sm90_packed_params;
  ParameterStruct parameters{sizeof(Params), {}};
  ParameterFields<Params> fields(parameters);
  set_packed(fields.inside(&Params::packed), gemm, places);
  fields.set(&Params::tokens, TensorMapArgument{.matrix = sorted_rows(program, gemm, places, facts),
                                                .dtype = gemm.dtype,
                                                .rows = gemm.m,
                                                .columns = gemm.k,
                                                .box_rows = static_cast<std::uint32_t>(tile.tokens),
                                                .box_columns = packed_k});
  for (std::size_t i = 0; i < gemm.packed.size(); ++i) {
    const PackedWeight& weight = gemm.packed[i];
    const std::int64_t row_tiles = packed_tiles(weight.n);  // of all groups
    TensorMapArgument of_rows{
        .matrix = tensor_of(places, weight.codes),
        .dtype = DType::f32,  // words, whose bits are copied
        .rows = row_tiles,
        .columns = packed_k_blocks(weight.k) * format.parts() * packed_part_bytes / 4,
        .box_rows = static_cast<std::uint32_t>(tile.row_tiles()),
        .box_columns = static_cast<std::uint32_t>(tile.box_parts(format) * packed_part_bytes / 4),
        .swizzled = false,
        .offset = packed_part_bytes};
    fields.set_at(&Params::codes, i, of_rows);
    if (format.group == 0) continue;
    of_rows.columns = weight.format.stored_groups(weight.k) * packed_rows;
    of_rows.box_columns = static_cast<std::uint32_t>(tile.groups(format) * packed_rows);
    of_rows.offset = 0;
    of_rows.matrix = tensor_of(places, weight.scales);
    of_rows.dtype =
        format.scale_bytes() == 2 ? weight.dtype : weight.format.scale_type(weight.dtype);
    fields.set_at(&Params::scales, i, of_rows);
    if (weight.zeros.empty()) continue;
    of_rows.matrix = tensor_of(places, weight.zeros);
    of_rows.dtype = DType::u8;
    fields.set_at(&Params::zeros, i, of_rows);
  }
  const std::int64_t works =
      tile.row_blocks(gemm.n) *
      (gemm.groups.any() ? gemm.groups.most_tiles(gemm.m, tile.tokens) : tile.token_tiles(product));
  // Tokens of a band of tiles stay in L2, while weights, a quarter of their bytes, pass by.
  constexpr int band_tokens = 1024;
  fields.inside(&Params::packed)
      .inside(&packed_params::gemm)
      .set(&gemm_params::group_m, std::max(1, band_tokens / tile.tokens));
  const std::int64_t resident = std::int64_t{facts.multiprocessors} * tile.ctas;
  KernelLaunch& launch = append_gemm(
      program, "gemm/sm90/packed.cu",
      fmt::format("packed_sm90<{}, {}, {}>", template_argument(form_of(gemm)),
                  template_argument(format),
                  StructText("sm90_packed_config", "tokens", tile.tokens, "tiles", tile.tiles,
                             "row_groups", tile.row_groups, "k_groups", tile.k_groups, "k_blocks",
                             tile.k_blocks, "ctas", tile.ctas, "split_k", tile.split_k)),
      tile.takes_several(product) && resident > 0 ? std::min(works, resident) : works,
      tile.threads(), std::move(parameters));
  launch.shared_bytes = static_cast<std::uint32_t>(tile.shared_bytes(operands, format));
  launch.programmatic = gemm.follows;
  // 8 tokens of 256 rows are few bytes behind many: with n=28672 they took 24.9 us behind all
  // weights, and 25.8 behind those of each stage. Warpgroups in turns at stages of 64 tokens failed
  // with that order.
  const bool early = gemm.follows || gemm.groups.any() || (tile.k_groups > 1 && tile.tokens > 32) ||
                     (tile.tokens == 8 && operands * tile.rows() >= 256);
  ParameterFields<Params>(*launch.parameters)
      .inside(&Params::packed)
      .set(&packed_params::loads_early, early);
  split_launch(program, launch, facts, tile.split_k, 0);
}

}  // namespace

constinit const Engine packed_sm90_engine{.name = "packed_sm90",
                                          .can_implement = can_implement,
                                          .search = {space, default_config, estimate},
                                          .is_preferred = is_preferred,
                                          .append = append,
                                          .sources = {"gemm/sm90/packed.cu"}};

}  // namespace fftune
