// The decode engine: can_implement, its space, which configuration to use untuned, and how
// its kernel is launched.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/least_cost.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/gemm/decode/config.cuh"
#include "kernels/gemm/decode/decode.hpp"
#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/launch.hpp"

namespace fftune {
namespace {

/// The sizes of a product that the space and the cost model read.
struct Product : GemmSize {
  int operands;
  bool fuses_norm;
  gemm_form form;

  explicit Product(const GemmProblem& gemm)
      : GemmSize(gemm),
        operands(gemm.b_operands()),
        fuses_norm(gemm.norm_of_a.any()),
        form(form_of(gemm)) {}
};

struct Block : decode_config {
  int split_k = 1;

  explicit Block(const Product& product)
      : decode_config{.tokens = stream_tokens(product.m), .l2_prefetch = 0} {}
  Block(const Product& product, const Config& config)
      : decode_config{.tokens = stream_tokens(product.m),
                      .rows = config.get("rows"),
                      .warps = config.get("warps"),
                      .unroll = config.get("unroll"),
                      .l2_prefetch =
                          config.contains("l2_prefetch") ? config.get("l2_prefetch") : 0},
        split_k(config.get("split_k")) {}

  std::int64_t row_blocks(const Product& product) const { return ceil_div(product.n, rows); }
  std::int64_t blocks(const Product& product) const { return row_blocks(product) * split_k; }
  /// 16-byte loads of weights that a thread has in flight.
  int loads(const Product& product) const { return shape(product.operands).loads(); }
  /// Registers of a thread, with about 28 for addresses and loops.
  int registers(const Product& product) const { return shape(product.operands).registers() + 28; }
  /// Of weights.
  double bytes(const Product& product) const {
    return 2.0 * static_cast<double>(product.operands * rows) * static_cast<double>(product.k) /
           split_k;
  }
  double blocks_of_processor(const Product& product, const DeviceFacts& facts) const {
    return std::ceil(static_cast<double>(blocks(product)) / std::max(facts.multiprocessors, 1));
  }
  /// Blocks of an SM that are resident at the same time.
  double resident(const Product& product, const DeviceFacts& facts) const {
    const double most = std::min(2048 / threads(), 65536 / (threads() * registers(product)));
    return std::clamp(most, 1.0, blocks_of_processor(product, facts));
  }
};

bool is_qkv(const GemmProblem& gemm) {
  return gemm.epilogue.kind == EpilogueKind::qkv;
}

/// Rows of each weight that a block may take; in a product of heads a whole head, or a part of one
/// with both features of every pair.
std::vector<std::int64_t> row_choices(const GemmProblem& gemm, const DeviceFacts& facts) {
  if (!is_qkv(gemm)) return {8, 16, 32};
  const qkv_form& heads = gemm.epilogue.qkv.form;
  std::vector<std::int64_t> choices;
  for (const int rows : {8, 16, 32, 48, 64}) {
    const int blocks = heads.dim / rows;
    if (heads.dim % rows != 0) continue;
    if (blocks > 1) {
      if (rows > 32) continue;
      if (heads.rotation == head_rotation::halves && heads.rotary % rows != 0) continue;
      if (heads.normalises && (!splits_in_clusters(facts) || blocks > max_split_k)) continue;
    }
    // Every eight rows take a warp in the reduction, and every warp a share of k.
    const std::int64_t warps = std::max<std::int64_t>(2, power_of_two(rows / 8));
    if (warps == 2 || gemm.k > 32 * (warps - 1)) choices.push_back(rows);
  }
  return choices;
}

std::optional<std::string> can_implement(const GemmChain& chain, const DeviceFacts& facts) {
  const GemmProblem& gemm = chain.front();
  if (auto reason = no_decode(gemm)) return reason;
  if (gemm.epilogue.kind == EpilogueKind::activation_gradient)
    return "it reads no gate and up: a linear or a gated epilogue";
  if (is_qkv(gemm) && row_choices(gemm, facts).empty())
    return fmt::format(
        "heads of {} features: a block needs 8 to 64 features, a whole head or both of every RoPE "
        "pair, and enough k for its warps; with head norms the blocks of a head are a cluster "
        "(compute capability 9.0) of up to {}",
        gemm.epilogue.qkv.form.dim, max_split_k);
  return misaligned_rows(gemm);
}

/// Whether asking L2 for weights is a choice: a norm is behind kernels that leave memory idle, as
/// attention does.
bool prefetches(const GemmProblem& gemm, const DeviceFacts& facts) {
  return gemm.norm_of_a.any() && facts.compute_capability >= 90;
}

TypedSpace<Block> blocks_of(const GemmProblem& gemm, const DeviceFacts& facts) {
  using Blocks = TypedSpace<Block>;
  const Product product(gemm);
  Blocks space{Block(product)};
  space
      .parameter("rows", "rows of each weight that a block takes: of a head all or some",
                 Blocks::to<&Block::rows>, row_choices(gemm, facts))
      .parameter("warps", "warps of a block, which share k", Blocks::to<&Block::warps>,
                 {2, 4, 8, 16})
      .parameter("unroll", "16-byte loads of a row that a thread issues at once",
                 Blocks::to<&Block::unroll>, {1, 2, 4, 8})
      .parameter("split_k", "blocks that share k", Blocks::to<&Block::split_k>,
                 {1, 2, 4, max_split_k});
  if (prefetches(gemm, facts))
    space
        .parameter("l2_prefetch",
                   "percent of its weights that a block asks L2 for before it may begin",
                   Blocks::to<&Block::l2_prefetch>, {0, 10, 30, 100})
        .when_absent(0);
  space.constraint("the reduction over warps needs a warp for every 8 rows", {"rows", "warps"},
                   [](const Block& b) { return b.rows / 8 <= b.warps; });
  limit_stream(space, {"rows", "warps", "unroll"}, [product](const Block& b) {
    return StreamNeeds{.loads = b.loads(product),
                       .registers = b.registers(product),
                       .threads = b.threads(),
                       .is_short = product.k <= 64};
  });
  space.constraint("every warp needs a share of k, 32 * unroll elements at the least",
                   {"warps", "unroll", "split_k"}, [k = product.k](const Block& b) {
                     return (b.warps == 2 && b.unroll == 1 && b.split_k == 1) ||
                            k > std::int64_t{32} * b.unroll * (b.warps * b.split_k - 1);
                   });
  space.constraint("more than half of the rows would be padding", {"rows"},
                   [n = product.n](const Block& b) { return b.rows == 8 || b.rows < 2 * n; });
  space.constraint("split-K excludes head norms across blocks: both need the cluster of a block",
                   {"rows", "split_k"}, [form = product.form](const Block& b) {
                     return b.split_k == 1 || !form.qkv.normalises || b.blocks_of_head(form) == 1;
                   });
  space.constraint("split-K pays only for fewer blocks of rows than SMs", {"rows", "split_k"},
                   [product, processors = facts.multiprocessors](const Block& b) {
                     return b.split_k == 1 || b.row_blocks(product) < processors;
                   });
  return space;
}

Space space(const GemmChain& chain, const DeviceFacts& facts) {
  return blocks_of(chain.front(), facts).space();
}

/// Relative slowdown from fusing A's RMSNorm. Until a block has the rows' reciprocal root mean
/// squares, and while its warps reduce their accumulators, it has no more than its first loads in
/// flight; other blocks of the SM fill that gap.
double longer_by_norm(const Block& block, const Product& product, const DeviceFacts& facts) {
  if (!product.fuses_norm) return 0;
  constexpr double idle_seconds = 2e-6;
  const double bandwidth = (facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12) /
                           std::max(facts.multiprocessors, 1);
  const double blocks = block.blocks_of_processor(product, facts);
  const double resident = block.resident(product, facts);
  return std::ceil(blocks / resident) * idle_seconds / resident /
         (blocks * block.bytes(product) / bandwidth);
}

/// Whether the weights that all resident blocks ask L2 for leave room there for others.
bool fits_l2(const Block& block, const Product& product, const DeviceFacts& facts) {
  constexpr double share = 0.4;
  const double blocks =
      std::min(static_cast<double>(block.blocks(product)),
               block.resident(product, facts) * std::max(facts.multiprocessors, 1));
  return blocks * block.bytes(product) * block.l2_prefetch / 100 <=
         share * static_cast<double>(facts.l2_bytes);
}

/// Microseconds of a launch untuned. The constants are fitted to 2,500 variants of 22 problems that
/// an H100 timed, and hold on an H200 (tests/landscapes).
double microseconds(const Block& block, const Product& product, const DeviceFacts& facts) {
  const double processors = std::max(facts.multiprocessors, 1);
  // Nine tenths of the datasheet's rate is the rate of a copy.
  const double bytes_per_us = 0.9e-6 * (facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12);
  const double weights = 2.0 * static_cast<double>(product.operands * product.n * product.k);
  const double each = block.blocks_of_processor(product, facts);
  const double resident = std::max(1.0, std::floor(block.resident(product, facts)));
  const double waves = std::ceil(each / resident);
  const double imbalance = each * processors / static_cast<double>(block.blocks(product));
  // Warps whose share of k is no whole number of loads issue some for padding.
  const double k_of_loads = 32.0 * block.unroll * block.warps * block.split_k;
  const double k = static_cast<double>(product.k);
  const double padding = std::ceil(k / k_of_loads) * k_of_loads / k;
  // Every block reads the tokens.
  const double tokens_read =
      1 + 0.035 * static_cast<double>(product.m) / (block.rows * product.operands);
  // Memory delivers at full speed once each SM has latency * bandwidth in flight.
  constexpr double latency_us = 1.655;
  const double wanted = latency_us * bytes_per_us / processors;
  const double in_flight = resident * block.threads() * 16 * block.loads(product);
  const double starved = std::pow(std::max(1.0, wanted / in_flight), 0.193);
  // And from pages of DRAM that are open: a block asks for this much of a row at a time, of few
  // rows. More than 2 KB gain nothing.
  const double row_bytes = 64.0 * block.unroll * block.warps;
  const double scattered =
      1 + 0.041 * std::max(0.0, std::log2(2048 / row_bytes)) + 0.02 * std::log2(block.rows / 8.0);
  const double stream = weights / bytes_per_us * std::pow(imbalance, 0.228) *
                        std::pow(padding, 0.07) * tokens_read * starved * scattered *
                        (1 + longer_by_norm(block, product, facts)) *
                        (1 - 1e-4 * block.l2_prefetch);
  const double split = block.split_k > 1 ? 0.89 : 0.0;
  return stream + 0.77 * waves + 0.0122 * block.unroll * block.tokens + split;
}

std::optional<double> estimate(const GemmChain& chain, const DeviceFacts& facts,
                               const Config& config) {
  const Product product(chain.front());
  return 1e-6 * microseconds(Block(product, config), product, facts);
}

Config default_config(const GemmChain& chain, const DeviceFacts& facts) {
  const Product product(chain.front());
  return least_cost(blocks_of(chain.front(), facts), "decode", [&](const Block& block) {
    return fits_l2(block, product, facts) ? microseconds(block, product, facts)
                                          : std::numeric_limits<double>::infinity();
  });
}

/// The share of the SMs that tiles of wgmma keep busy, by the better of the usual two widths.
double filled_by_tiles(const GemmProblem& gemm, const DeviceFacts& facts) {
  const auto processors = std::max<std::int64_t>(facts.multiprocessors, 1);
  const auto filled = [&](std::int64_t columns) {
    const std::int64_t tiles = ceil_div(gemm.n, columns);
    return static_cast<double>(tiles) /
           static_cast<double>(ceil_div(tiles, processors) * processors);
  };
  return std::max(filled(64), filled(128));
}

/// More than 8 tokens take two MMAs for each 16 bytes of a weight, and more of a block's time for
/// the sums of its warps. Then tiles of wgmma whose rows are features stream weights faster, in
/// nearly all of 75 products of 16 tokens in layers of an H200. Heads of q, k and v have no such
/// tiles. Many features for their k stay, if they are small or if their tiles keep few SMs busy.
/// With 16 sequences an H100 took 202.6 us for a layer of Llama-3.1-8B and 79.1 for one of
/// Llama-3.2-1B, 214.1 and 81.8 with these kernels for `ffn`.
bool is_preferred(const GemmChain& chain, const DeviceFacts& facts) {
  constexpr double large = 24e6, busy = 0.76;
  const GemmProblem& gemm = chain.front();
  const std::int64_t features = gemm.b_operands() * gemm.n;
  const double bytes = 2.0 * static_cast<double>(features * gemm.k);
  return gemm.m <= 8 ||
         (features > 3 * gemm.k && (bytes < large || filled_by_tiles(gemm, facts) < busy)) ||
         is_qkv(gemm) || sm90_engine.can_implement(chain, facts).has_value();
}

void append(Program& program, const GemmChain& chain, const TensorPlaces& places,
            const DeviceFacts& facts, const Config& config) {
  const GemmProblem& gemm = chain.front();
  const Product product(gemm);
  const Block block(product, config);
  const gemm_form& form = product.form;
  ParameterStruct parameters =
      form.is_qkv() ? heads_parameters(gemm, places)
                    : plain_parameters(gemm, places, std::nullopt, sizeof(plain_params));
  KernelLaunch& launch =
      append_gemm(program, "gemm/decode/gemm.cu",
                  fmt::format("decode_gemm<{}, {}>", template_argument(form),
                              StructText("decode_config", "tokens", block.tokens, "rows",
                                         block.rows, "warps", block.warps, "unroll", block.unroll,
                                         "l2_prefetch", block.l2_prefetch)),
                  block.row_blocks(product), block.threads(), std::move(parameters));
  launch.shared_bytes = static_cast<std::uint32_t>(block.shared_bytes(form));
  launch.programmatic = gemm.follows && facts.compute_capability >= 90;
  split_launch(program, launch, facts, block.split_k,
               std::int64_t{64} * gemm.b_operands() * block.rows);
  if (form.qkv.normalises && block.blocks_of_head(form) > 1)
    launch.cluster.x = static_cast<std::uint32_t>(block.blocks_of_head(form));
}

}  // namespace

int decode_tokens(const GemmProblem& gemm) {
  return stream_tokens(gemm.m);
}

std::optional<std::string> no_decode(const GemmProblem& gemm) {
  if (gemm.m > most_stream_rows)
    return fmt::format("the kernel holds the tokens in one operand of mma.sync: m={} is over {}",
                       gemm.m, most_stream_rows);
  if (gemm.dtype != DType::bf16 && gemm.dtype != DType::fp16)
    return fmt::format("mma.sync m16n8k16 multiplies bf16 and fp16, not {}",
                       dtype_name(gemm.dtype));
  const bool widens = gemm.c_dtype == DType::f32 && gemm.epilogue.kind == EpilogueKind::linear;
  if ((gemm.c_dtype != gemm.dtype && !widens) || gemm.wide_dtype != gemm.dtype ||
      gemm.quantisation.any())
    return fmt::format("its output has the type of its operands, {}, or f32, without scales",
                       dtype_name(gemm.dtype));
  if (gemm.groups.any()) return "it reads each weight once for all tokens: no groups";
  if (gemm.form != GemmForm::single && gemm.form != GemmForm::dual_b)
    return "it has one A and one output";
  if (gemm.a_major == Major::mn || gemm.b_major == Major::mn)
    return "it loads 16 bytes of k at a time: K-major operands";
  if (gemm.b_depends)
    return "it loads B before it waits for earlier launches, which must not write B";
  return std::nullopt;
}

constinit const Engine decode_engine{.name = "decode",
                                     .can_implement = can_implement,
                                     .search = {space, default_config, estimate},
                                     .is_preferred = is_preferred,
                                     .append = append,
                                     .sources = {"gemm/decode/gemm.cu"}};

}  // namespace fftune
