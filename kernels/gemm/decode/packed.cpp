// The decode engine for packed weights: can_implement, its space, which configuration to use
// untuned, and how its kernel (packed.cu) is launched.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/least_cost.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/gemm/decode/decode.hpp"
#include "kernels/gemm/decode/packed_config.cuh"
#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "kernels/gemm/packed/params.cuh"

namespace fftune {
namespace {

constexpr std::int64_t most_tokens = 64;

/// Groups that may have rows.
std::int64_t group_slots(const GemmProblem& gemm) {
  return gemm.groups.any() ? std::min(gemm.groups.count, gemm.m) : 1;
}

/// A product as the space and the cost model see it: one of the usual rows of a group.
struct Product : GemmSize {
  std::int64_t most_m;  // rows that nearly no group exceeds; more take a further pass
  std::int64_t all_n;   // rows of B of all groups that usually have some
  int operands;
  bool grouped;
  packed_form format;

  explicit Product(const GemmProblem& gemm)
      : GemmSize(gemm),
        most_m(gemm.m),
        all_n(gemm.n),
        operands(gemm.b_operands()),
        grouped(gemm.groups.any()),
        format(packed_form_of(gemm)) {
    if (!grouped) return;
    const double used = std::max(gemm.groups.with_rows(), 1.0);
    const double rows = static_cast<double>(gemm.m) / used;
    m = std::max<std::int64_t>(1, std::llround(rows));
    // The rows of a group are close to Poisson distributed.
    most_m = std::clamp<std::int64_t>(std::llround(rows + 2 * std::sqrt(rows)), 1, gemm.m);
    all_n *= std::max<std::int64_t>(1, std::llround(used));
  }
};

/// The tokens of a kernel for `m`: few numbers of them, so that few kernels serve all.
int tokens_of(std::int64_t m) {
  for (const int tokens : {8, 16, 32})
    if (m <= tokens) return tokens;
  return most_tokens;
}

struct Block : packed_config {
  int split_k = 1;

  explicit Block(const Product& product) : packed_config{.tokens = tokens_of(product.most_m)} {}
  Block(const Product& product, const Config& config)
      : packed_config{.tokens = tokens_of(product.most_m),
                      .tiles = config.get("tiles"),
                      .row_warps = config.get("row_warps"),
                      .k_warps = config.get("k_warps"),
                      .unroll = config.get("unroll")},
        split_k(config.get("split_k")) {}

  std::int64_t row_blocks(std::int64_t n) const { return ceil_div(n, rows()); }
  /// 16-byte loads of weights that a thread has in flight.
  int loads(const Product& product) const {
    return product.operands * tiles * unroll * product.format.parts();
  }
  /// Registers of a thread, with some for addresses and loops.
  int thread_registers(const Product& product) const {
    return registers(product.operands, product.format) + 36 + 2 * n_fragments();
  }
  /// Shared memory with that of split-K in clusters.
  int most_shared(const Product& product) const {
    const int own = shared_bytes(product.operands);
    return split_k == 1 ? own : std::max(own, share_bytes(product.operands));
  }
  /// Blocks of an SM that are resident at the same time.
  double resident(const Product& product, const DeviceFacts& facts) const {
    const int by_registers = 65536 / (threads() * std::min(thread_registers(product), 255));
    const auto by_shared =
        static_cast<int>(facts.shared_bytes_per_multiprocessor / (most_shared(product) + 1024));
    return std::max(1, std::min({2048 / threads(), by_registers, by_shared}));
  }
};

std::optional<std::string> can_implement(const GemmChain& chain, const DeviceFacts&) {
  const GemmProblem& gemm = chain.front();
  if (gemm.packed.empty()) return "it reads packed weights: give weights=" + packed_names();
  if (auto reason = refuse_packed_groups(gemm)) return reason;
  if (const std::int64_t m = Product(gemm).m; m > most_tokens)
    return fmt::format("a warp has the sums of all tokens in registers: m={} is over {}", m,
                       most_tokens);
  if (gemm.dtype != DType::bf16 && gemm.dtype != DType::fp16)
    return fmt::format("mma.sync m16n8k16 multiplies bf16 and fp16, not {}",
                       dtype_name(gemm.dtype));
  if (gemm.epilogue.kind != EpilogueKind::linear && gemm.epilogue.kind != EpilogueKind::gated)
    return "it has a linear or a gated epilogue";
  return misaligned_rows(gemm);
}

TypedSpace<Block> blocks_of(const Product& product, const DeviceFacts& facts) {
  using Blocks = TypedSpace<Block>;
  Blocks space{Block(product)};
  space
      .parameter("tiles", "tiles of 16 rows of each weight that a warp takes",
                 Blocks::to<&Block::tiles>, {1, 2, 4})
      .parameter("row_warps", "warps of a block that take other rows",
                 Blocks::to<&Block::row_warps>, {1, 2, 4, 8})
      .parameter("k_warps", "warps of a block that share k", Blocks::to<&Block::k_warps>,
                 {1, 2, 4, 8})
      .parameter("unroll", "blocks of 64 of k that a warp has in flight",
                 Blocks::to<&Block::unroll>, {1, 2, 4, 8})
      .parameter("split_k", "blocks that share k", Blocks::to<&Block::split_k>,
                 {1, 2, 3, 4, 5, 6, 7, max_split_k});
  space.constraint("a block has at most 16 warps: more have too few registers",
                   {"row_warps", "k_warps"}, [](const Block& b) { return b.warps() <= 16; });
  limit_stream(space, {"tiles", "row_warps", "k_warps", "unroll"}, [product](const Block& b) {
    return StreamNeeds{.loads = b.loads(product),
                       .registers = b.thread_registers(product),
                       .threads = b.threads(),
                       .is_short = product.k <= packed_k};
  });
  const Blocks::Names all{"tiles", "row_warps", "k_warps", "unroll", "split_k"};
  space.constraint(
      "the tokens of three stages, or the accumulators of the k warps, must fit in shared memory",
      all, [product, most = facts.shared_bytes_per_block](const Block& b) {
        return b.most_shared(product) <= most;
      });
  space.constraint("every warp needs a share of k, 64 * unroll elements at the least",
                   {"k_warps", "unroll", "split_k"}, [k = product.k](const Block& b) {
                     return (b.k_warps == 1 && b.unroll == 1 && b.split_k == 1) ||
                            k > std::int64_t{packed_k} * b.unroll * (b.k_warps * b.split_k - 1);
                   });
  space.constraint(
      "more than half of the rows would be padding", {"tiles", "row_warps"},
      [n = product.n](const Block& b) { return b.rows() == packed_rows || b.rows() < 2 * n; });
  space.constraint(
      "split-K pays only for fewer blocks of rows than SMs", {"tiles", "row_warps", "split_k"},
      [product, processors = facts.multiprocessors](const Block& b) {
        return b.split_k == 1 || (!product.grouped && b.row_blocks(product.n) < processors);
      });
  return space;
}

Space space(const GemmChain& chain, const DeviceFacts& facts) {
  return blocks_of(Product(chain.front()), facts).space();
}

/// SMs that clusters of `split_k` blocks fill: a cluster lies within one GPC.
double usable_processors(const Block& block, const DeviceFacts& facts) {
  const double processors = std::max(facts.multiprocessors, 1);
  if (block.split_k <= 2 || !splits_in_clusters(facts)) return processors;
  return std::max(1.0, std::floor(0.9 * processors / block.split_k)) * block.split_k;
}

/// Microseconds of a launch untuned. The constants are fitted to 240 variants of nine problems that
/// an H100 timed, with a deviation of 19%; the start to the times of eleven products, and the ends
/// of experts' weights to layers that an H200 timed (tests/landscapes/default_test.cpp).
double microseconds(const Block& block, const Product& product, const DeviceFacts& facts) {
  const double clocks = 0.886e-6 * (facts.clock_hz > 0 ? facts.clock_hz : 1.8e9);
  const double bytes_per_us = 0.9e-6 * (facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12);
  const packed_form& format = product.format;
  const double k = static_cast<double>(product.k), m = static_cast<double>(product.m);
  const double units = block.tiles * product.operands;
  const auto blocks = static_cast<double>(block.row_blocks(product.all_n) * block.split_k);
  const double each = std::ceil(blocks / usable_processors(block, facts));
  const double resident = std::min(block.resident(product, facts), each);
  const double waves = std::ceil(each / resident);
  const double stages = std::ceil(k / (packed_k * block.stage_k_blocks()) / block.split_k);

  // Instructions of a warp's stage: codes that it expands, MMAs, tokens that it reads and copies.
  const int fragments = block.n_fragments();
  const double of_word = 13 + (block.scales_operands(format) ? 5 : 0) + 3.74 * fragments;
  const double scaled_sums = block.scales_operands(format) || format.group == 0
                                 ? 0
                                 : block.scales_of_run(format) * units * 4 * fragments;
  const double copies = std::ceil(m * block.stage_k_blocks() * 8 / block.threads());
  const double issue =
      1.4 * (block.unroll * (4 * units * of_word + 4 * fragments) + scaled_sums + 30 * copies + 30);
  const double warps = block.warps() * resident;
  const double stage = std::max(issue * warps / 4, 939 + issue);
  // Groups with more rows than a pass serves take further ones: half of their last is padding.
  const double passes = product.most_m > block.tokens ? m / block.tokens + 0.5 : 1;
  const double compute = waves * stages * stage * passes / clocks;
  const double memory = 0.515 * format.parts() *
                        static_cast<double>(product.operands * product.all_n) * k / bytes_per_us;
  const double l2 = blocks * m * (k / block.split_k) * 2 / 5.07e6;
  const double stream =
      std::pow(std::pow(memory, 4) + std::pow(compute, 4) + std::pow(l2, 4), 0.25);
  const double large = 1 + 0.07 * std::log2(block.tiles) + 0.065 * std::log2(block.unroll);
  // Between the weights of two experts a warp has few loads in flight, or four tiles' rows to end.
  const bool few_loads = block.unroll == 1 && product.operands == 2;
  const double ends =
      product.grouped ? 1.03 * (few_loads ? 1.14 : 1) * (block.tiles == 4 ? 1.05 : 1) : 1;
  // Weights that are read in less than 3 us overlap with the launch's start.
  const double start = 1.58 - (product.grouped ? 0 : 1.3 * std::max(0.0, 1 - memory / 2.9));
  return stream * large * ends + start + 1.96 * waves +
         (block.split_k > 1 ? 0.34 * block.split_k : 0);
}

std::optional<double> estimate(const GemmChain& chain, const DeviceFacts& facts,
                               const Config& config) {
  const Product product(chain.front());
  return 1e-6 * microseconds(Block(product, config), product, facts);
}

Config default_config(const GemmChain& chain, const DeviceFacts& facts) {
  const Product product(chain.front());
  return least_cost(blocks_of(product, facts), "packed_decode",
                    [&](const Block& block) { return microseconds(block, product, facts); });
}

void append(Program& program, const GemmChain& chain, const TensorPlaces& places,
            const DeviceFacts& facts, const Config& config) {
  GemmProblem gemm = chain.front();
  Groups& groups = gemm.groups;
  // A warp counts one id a lane while the launch before sorts them, and no groups of all rows.
  const bool counts = groups.ready == groups_ready::counted && groups.id_count <= 32 &&
                      groups.whole_groups == 0 && !gemm.a_sorted;
  if (groups.ready == groups_ready::counted && !counts) groups.ready = groups_ready::awaited;
  const Product product(gemm);
  const Block block(product, config);
  const gemm_form form = form_of(gemm);
  using Params = packed_params;
  ParameterStruct parameters{sizeof(Params), {}};
  ParameterFields<Params> fields(parameters);
  set_packed(fields, gemm, places);
  if (counts) fields.set(&Params::choices, groups.choices);
  KernelLaunch& launch = append_gemm(
      program, "gemm/decode/packed.cu",
      fmt::format(
          "packed_decode<{}, {}, {}>", template_argument(form), template_argument(product.format),
          StructText("packed_config", "tokens", block.tokens, "tiles", block.tiles, "row_warps",
                     block.row_warps, "k_warps", block.k_warps, "unroll", block.unroll)),
      block.row_blocks(gemm.n) * group_slots(gemm), block.threads(), std::move(parameters));
  launch.shared_bytes = static_cast<std::uint32_t>(block.shared_bytes(gemm.b_operands()));
  launch.programmatic = gemm.follows && facts.compute_capability >= 90;
  if (counts)
    launch.read_early = {tensor_of(places, groups.ids), tensor_of(places, gemm.a.front().front())};
  split_launch(program, launch, facts, block.split_k, block.share_bytes(gemm.b_operands()));
}

}  // namespace

constinit const Engine packed_decode_engine{.name = "packed_decode",
                                            .can_implement = can_implement,
                                            .search = {space, default_config, estimate},
                                            .append = append,
                                            .sources = {"gemm/decode/packed.cu"}};

}  // namespace fftune
