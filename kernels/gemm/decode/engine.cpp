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
  int loads(const GemmProblem& gemm) const { return shape(gemm.b_operands()).loads(); }
  /// Registers of a thread, with about 28 for addresses and loops.
  int registers(const GemmProblem& gemm) const { return shape(gemm.b_operands()).registers() + 28; }
  /// Of weights.
  double bytes(const GemmProblem& gemm) const {
    return 2.0 * static_cast<double>(gemm.b_operands() * rows) * static_cast<double>(gemm.k) /
           split_k;
  }
  double blocks_of_processor(const GemmProblem& gemm, const DeviceFacts& facts) const {
    return std::ceil(static_cast<double>(blocks(gemm)) / std::max(facts.multiprocessors, 1));
  }
  /// Blocks of an SM that are resident at the same time.
  double resident(const GemmProblem& gemm, const DeviceFacts& facts) const {
    const double most = std::min(2048 / threads(), 65536 / (threads() * registers(gemm)));
    return std::clamp(most, 1.0, blocks_of_processor(gemm, facts));
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
    space
        .parameter("l2_prefetch",
                   "percent of its weights that a block asks L2 for before it may begin",
                   {0, 10, 30, 100})
        .when_absent(0);
  const auto add = [&](const char* reason, auto holds) {
    space.constraint(reason,
                     [gemm, holds](const Config& config) { return holds(Block(gemm, config)); });
  };
  add("the reduction over warps gives every group of 8 rows a warp of its own",
      [](const Block& b) { return b.rows / 8 <= b.warps; });
  limit_stream(space, [=](const Config& config) {
    const Block block(gemm, config);
    return StreamNeeds{.loads = block.loads(gemm),
                       .registers = block.registers(gemm),
                       .threads = block.threads(),
                       .is_short = gemm.k <= 64};
  });
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

/// Relative slowdown from fusing A's RMSNorm. Until a block has the rows' reciprocal root mean
/// squares, and while its warps reduce their accumulators, it has no more than its first loads in
/// flight; other blocks of the SM fill that gap.
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

/// Microseconds of a launch untuned. The constants are fitted to 2,500 variants of 22 problems that
/// an H100 timed, and hold on an H200 (tests/landscapes).
double microseconds(const Block& block, const GemmProblem& gemm, const DeviceFacts& facts) {
  const double processors = std::max(facts.multiprocessors, 1);
  // Nine tenths of the datasheet's rate is the rate of a copy.
  const double bytes_per_us = 0.9e-6 * (facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12);
  const double weights = 2.0 * static_cast<double>(gemm.b_operands() * gemm.n * gemm.k);
  const double each = block.blocks_of_processor(gemm, facts);
  const double resident = std::max(1.0, std::floor(block.resident(gemm, facts)));
  const double waves = std::ceil(each / resident);
  const double imbalance = each * processors / static_cast<double>(block.blocks(gemm));
  // Warps whose share of k is no whole number of loads issue some for padding.
  const double k_of_loads = 32.0 * block.unroll * block.warps * block.split_k;
  const double k = static_cast<double>(gemm.k);
  const double padding = std::ceil(k / k_of_loads) * k_of_loads / k;
  // Every block reads the tokens.
  const double tokens_read =
      1 + 0.028 * static_cast<double>(gemm.m) / (block.rows * gemm.b_operands());
  // Memory delivers at full speed once each SM has latency * bandwidth in flight.
  constexpr double latency_us = 1.73;
  const double wanted = latency_us * bytes_per_us / processors;
  const double in_flight = resident * block.threads() * 16 * block.loads(gemm);
  const double starved = std::pow(std::max(1.0, wanted / in_flight), 0.21);
  const double stream = weights / bytes_per_us * std::pow(imbalance, 0.28) *
                        std::pow(padding, 0.16) * tokens_read * starved *
                        (1 + 0.085 / block.loads(gemm)) * (1 + longer_by_norm(block, gemm, facts)) *
                        (1 - 1e-4 * block.l2_prefetch);
  const double fill = in_flight * processors / bytes_per_us;
  const double split = block.split_k > 1 ? 1.8 : 0.0;
  return stream + 0.32 * waves + 0.019 * fill + 0.0085 * block.unroll * block.tokens +
         0.043 * std::abs(std::log2(block.warps / 8.0)) + split;
}

Config default_config(const GemmChain& chain, const DeviceFacts& facts) {
  const GemmProblem& gemm = chain.front();
  return least_cost(space(chain, facts), "decode", [&](const Config& config) {
    const Block block(gemm, config);
    return fits_l2(block, gemm, facts) ? microseconds(block, gemm, facts)
                                       : std::numeric_limits<double>::infinity();
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
  return stream_tokens(gemm.m);
}

void limit_stream(Space& space, const std::function<StreamNeeds(const Config&)>& needs,
                  const std::vector<std::string>& reads) {
  space
      .constraint(
          "the loads in flight are held in registers: 255 a thread, and 65,536 an SM",
          [needs](const Config& config) {
            const StreamNeeds stream = needs(config);
            return stream.registers <= most_registers(stream.threads);
          },
          reads)
      .constraint(
          "2 to 16 loads in flight: one a thread does not cover the latency of memory, and more "
          "than 16 only start later",
          [needs](const Config& config) {
            const StreamNeeds stream = needs(config);
            return (stream.loads >= 2 || stream.is_short) && stream.loads <= 16;
          },
          reads);
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

constinit const Engine decode_engine{.name = "decode",
                                     .can_implement = can_implement,
                                     .search = {space, default_config},
                                     .append = append,
                                     .sources = {"gemm/decode/gemm.cu"}};

}  // namespace fftune
