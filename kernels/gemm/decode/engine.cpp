// The decode engine: what it can implement, its space, which configuration to use untuned, and how
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
#include "kernels/gemm/decode/config.cuh"
#include "kernels/gemm/decode/decode.hpp"
#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/launch.hpp"

namespace fftune {
namespace {

struct Block : decode_config {
  int split_k;

  Block(const GemmProblem& gemm, const Config& config)
      : decode_config{.tokens = decode_tokens(gemm),
                      .rows = config.get("rows"),
                      .warps = config.get("warps"),
                      .unroll = config.get("unroll"),
                      .l2_prefetch =
                          config.contains("l2_prefetch") ? config.get("l2_prefetch") : 0},
        split_k(config.get("split_k")) {}

  std::int64_t blocks(const GemmProblem& gemm) const { return ceil_div(gemm.n, rows) * split_k; }
  /// 16-byte loads of weights that a thread has in flight.
  int loads(const GemmProblem& gemm) const { return gemm.b_operands() * rows / 8 * unroll; }
  /// What a thread holds: weights and tokens in flight, accumulators, and about 28 for addresses
  /// and loops.
  int registers(const GemmProblem& gemm) const {
    return 4 * loads(gemm) + tokens / 2 * unroll + gemm.b_operands() * rows / 2 + 28;
  }
  /// Of weights.
  double bytes(const GemmProblem& gemm) const {
    return 2.0 * static_cast<double>(gemm.b_operands() * rows) * static_cast<double>(gemm.k) /
           split_k;
  }
  double blocks_of_processor(const GemmProblem& gemm, const DeviceFacts& facts) const {
    return std::ceil(static_cast<double>(blocks(gemm)) / std::max(facts.multiprocessors, 1));
  }
  /// Of those of a multiprocessor how many are there at once.
  double resident(const GemmProblem& gemm, const DeviceFacts& facts) const {
    const double most = std::min(2048 / threads(), 65536 / (threads() * registers(gemm)));
    return std::clamp(most, 1.0, blocks_of_processor(gemm, facts));
  }
};

bool is_qkv(const GemmProblem& gemm) {
  return gemm.epilogue.kind == EpilogueKind::qkv;
}

/// Rows of each weight that a block may take: of a product of heads a whole one, or a part of one
/// in which both features of every pair are.
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
        "heads of {} features: a block has 8 to 64 of them, a whole head or both of every pair, "
        "and "
        "a k to share among its warps; several that normalise one are a cluster (sm_90) of up to "
        "{}",
        gemm.epilogue.qkv.form.dim, max_split_k);
  return misaligned_rows(gemm);
}

/// Whether asking L2 for weights is a choice: a norm is behind kernels that leave memory idle, as
/// attention does.
bool prefetches(const GemmProblem& gemm, const DeviceFacts& facts) {
  return gemm.norm_of_a.any() && facts.compute_capability >= 90;
}

Space space(const GemmChain& chain, const DeviceFacts& facts) {
  const GemmProblem gemm = chain.front();
  Space space;
  space
      .parameter("rows", "rows of each weight that a block takes: of a head all or some",
                 row_choices(gemm, facts))
      .parameter("warps", "warps of a block, which share k", {2, 4, 8, 16})
      .parameter("unroll", "16-byte loads of a row that a thread issues at once", {1, 2, 4, 8})
      .parameter("split_k", "blocks that share k", {1, 2, 4, max_split_k});
  if (prefetches(gemm, facts))
    space.parameter("l2_prefetch",
                    "percent of its weights that a block asks L2 for before it may begin",
                    {0, 10, 30, 100});
  const auto add = [&](const char* reason, auto holds) {
    space.constraint(reason,
                     [gemm, holds](const Config& config) { return holds(Block(gemm, config)); });
  };
  add("the reduction over warps gives every group of 8 rows a warp of its own",
      [](const Block& b) { return b.rows / 8 <= b.warps; });
  add("the loads in flight are held in registers: 255 a thread, and 65,536 an SM",
      [=](const Block& b) { return b.registers(gemm) <= std::min(255, 65536 / b.threads()); });
  add("2 to 16 loads in flight: one a thread does not cover the latency of memory, and more than "
      "16 only start later",
      [=](const Block& b) { return (b.loads(gemm) >= 2 || gemm.k <= 64) && b.loads(gemm) <= 16; });
  add("every warp needs a share of k, 32 * unroll elements at the least", [=](const Block& b) {
    return (b.warps == 2 && b.unroll == 1 && b.split_k == 1) ||
           gemm.k > std::int64_t{32} * b.unroll * (b.warps * b.split_k - 1);
  });
  add("more than half of the rows would be padding",
      [=](const Block& b) { return b.rows == 8 || b.rows < 2 * gemm.n; });
  add("the blocks of a head that is normalised are a cluster, and those that share k another",
      [=, form = form_of(gemm)](const Block& b) {
        return b.split_k == 1 || !form.qkv.normalises || b.blocks_of_head(form) == 1;
      });
  add("splitting k pays only while there are fewer blocks of rows than SMs", [=](const Block& b) {
    return b.split_k == 1 || b.blocks(gemm) / b.split_k < facts.multiprocessors;
  });
  return space;
}

/// By what part a norm of A makes the kernel longer. Until a block has the rows' deviations, and
/// while its warps add up what they have, it has no more than its first loads in flight; others of
/// the multiprocessor fill that in.
double longer_by_norm(const Block& block, const GemmProblem& gemm, const DeviceFacts& facts) {
  if (!gemm.norm_of_a.any()) return 0;
  constexpr double idle_seconds = 2e-6;
  const double bandwidth = (facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12) /
                           std::max(facts.multiprocessors, 1);
  const double blocks = block.blocks_of_processor(gemm, facts);
  const double resident = block.resident(gemm, facts);
  return std::ceil(blocks / resident) * idle_seconds / resident /
         (blocks * block.bytes(gemm) / bandwidth);
}

/// Whether the weights that all resident blocks ask L2 for leave room there for others.
bool fits_l2(const Block& block, const GemmProblem& gemm, const DeviceFacts& facts) {
  constexpr double share = 0.4;
  const double blocks = std::min(static_cast<double>(block.blocks(gemm)),
                                 block.resident(gemm, facts) * std::max(facts.multiprocessors, 1));
  return blocks * block.bytes(gemm) * block.l2_prefetch / 100 <=
         share * static_cast<double>(facts.l2_bytes);
}

Config default_config(const GemmChain& chain, const DeviceFacts& facts) {
  // Memory delivers at full speed once each SM has about latency * bandwidth in flight: 0.7 us *
  // 33 GB/s, some 24 KiB on an H200, and less on others. Tokens are read by every block.
  constexpr double wanted_bytes = 24 * 1024;
  const GemmProblem& gemm = chain.front();
  const double processors = std::max(facts.multiprocessors, 1);
  return least_cost(space(chain, facts), "decode", [&](const Config& config) {
    const Block block(gemm, config);
    if (!fits_l2(block, gemm, facts)) return std::numeric_limits<double>::infinity();
    const double blocks = static_cast<double>(block.blocks(gemm));
    const double each = std::ceil(blocks / processors);
    const double resident = std::min(each, 2048.0 / block.threads());
    const double in_flight = resident * block.threads() * 16 * block.loads(gemm);
    const double imbalance = each * processors / blocks;
    const double tokens_read = 1 + static_cast<double>(gemm.m) / (block.rows * gemm.b_operands());
    // Short rounds wait for memory more often, and a block of 8 warps is large enough to share the
    // tokens in L1 and small enough to start early.
    const double rounds =
        1 + 0.15 / block.loads(gemm) + 0.02 * std::abs(std::log2(block.warps / 8.0));
    return rounds * imbalance * std::max(1.0, wanted_bytes / in_flight) *
           (0.9 + 0.1 * tokens_read) * (block.split_k > 1 ? 1.3 : 1.0) *
           (1 + longer_by_norm(block, gemm, facts)) * (1 - 1e-4 * block.l2_prefetch);
  });
}

void append(Program& program, const GemmChain& chain, const TensorPlaces& places,
            const DeviceFacts& facts, const Config& config) {
  const GemmProblem& gemm = chain.front();
  const Block block(gemm, config);
  const gemm_form form = form_of(gemm);
  ParameterStruct parameters = form.is_qkv() ? heads_parameters(gemm, places)
                                             : gemm_parameters(gemm, places, sizeof(plain_params));
  KernelLaunch& launch =
      append_gemm(program, "gemm/decode/gemm.cu",
                  fmt::format("decode_gemm<{}, fftune::decode_config{{{}, {}, {}, {}, {}}}>",
                              template_argument(form), block.tokens, block.rows, block.warps,
                              block.unroll, block.l2_prefetch),
                  ceil_div(gemm.n, block.rows), block.threads(), std::move(parameters));
  launch.shared_bytes = static_cast<std::uint32_t>(block.shared_bytes(form));
  launch.programmatic = gemm.follows && facts.compute_capability >= 90;
  split_launch(program, launch, facts, block.split_k,
               std::int64_t{64} * gemm.b_operands() * block.rows);
  if (form.qkv.normalises && block.blocks_of_head(form) > 1)
    launch.cluster.x = static_cast<std::uint32_t>(block.blocks_of_head(form));
}

}  // namespace

int decode_tokens(const GemmProblem& gemm) {
  return gemm.m <= 8 ? 8 : 16;
}

std::optional<std::string> no_decode(const GemmProblem& gemm) {
  constexpr std::int64_t most_tokens = 16;
  if (gemm.m > most_tokens)
    return fmt::format("the kernel holds the tokens in one operand of mma.sync: m={} is over {}",
                       gemm.m, most_tokens);
  if (gemm.dtype != DType::bf16 && gemm.dtype != DType::fp16)
    return fmt::format("mma.sync m16n8k16 multiplies bf16 and fp16, not {}",
                       dtype_name(gemm.dtype));
  const bool widens = gemm.c_dtype == DType::f32 && gemm.epilogue.kind == EpilogueKind::linear;
  if ((gemm.c_dtype != gemm.dtype && !widens) || gemm.wide_dtype != gemm.dtype ||
      gemm.quantisation.any())
    return fmt::format("it stores what it multiplies, {}, or f32, without scales",
                       dtype_name(gemm.dtype));
  if (gemm.groups.any()) return "it reads each weight once for all tokens: no groups";
  if (gemm.form != GemmForm::single && gemm.form != GemmForm::dual_b)
    return "it has one A and one output";
  if (gemm.a_major == Major::mn || gemm.b_major == Major::mn)
    return "it loads 16 bytes of k at a time: K-major operands";
  if (gemm.b_depends) return "it loads B before the launches that come before it are complete";
  return std::nullopt;
}

const Engine& decode_engine() {
  static const Engine engine{.name = "decode",
                             .can_implement = can_implement,
                             .space = space,
                             .default_config = default_config,
                             .append = append,
                             .sources = {"gemm/decode/gemm.cu"}};
  return engine;
}

}  // namespace fftune
