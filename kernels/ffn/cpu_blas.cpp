// Blocks over OpenBLAS: every thread multiplies blocks of its own with a product of one thread.
//
// fused: for a block of tokens and a block of intermediate features, gate and up, their
// activation, and at once their share of y, so that the intermediate never leaves the cache.
// Otherwise the whole intermediate first, by blocks, and then y by blocks.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/blas.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/cpu_vector.hpp"
#include "kernels/ffn/backward.hpp"
#include "kernels/ffn/cpu_work.hpp"
#include "kernels/ffn/families.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {
namespace {

constexpr std::int64_t most_lane_bytes = std::int64_t{256} << 20;

struct Blocks {
  Shape shape;
  Places places;
  DType dtype = DType::f32;
  Activation activation = Activation::silu;
  std::int64_t tokens = 0;  // of a block
  std::int64_t inter = 0;   // intermediate features of a block; of y's where it is not fused
  int threads = 1;
  bool fused = false;
  Form form;
  const VectorKernels* vector = nullptr;

  std::int64_t token_blocks() const { return ceil_of(shape.m, tokens); }
  std::int64_t inter_blocks() const { return ceil_of(shape.h, inter); }
  /// Fused blocks of tokens that are fewer than threads share out the intermediate features, and
  /// their shares of y are added up in order at the end.
  std::int64_t splits() const {
    return fused ? std::min(ceil_of(threads, token_blocks()), inter_blocks()) : 1;
  }
  bool sums_in_y() const { return fused && splits() == 1 && dtype == DType::f32 && !form.adds(); }

  /// Elements of f32 of one lane: gate, up or y of a block, and operands widened from bf16.
  std::int64_t lane_floats() const {
    const std::int64_t depth = fused ? shape.d : std::max(shape.d, shape.h);
    const std::int64_t widened = dtype == DType::f32 ? 0 : (tokens + inter) * depth;
    return 2 * tokens * inter + widened;
  }
  std::int64_t partial_floats() const {
    return fused && !sums_in_y() ? splits() * shape.m * shape.d : 0;
  }
};

Blocks blocks_of(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  return {.shape = shape_of(problem),
          .places = places_of(problem),
          .dtype = problem.dtype,
          .activation = parse_activation(problem.option("act")),
          .tokens = std::min(config.at("block_m"), problem.size("m")),
          .inter = std::min(config.at("block_n"), problem.size("h")),
          .threads = config.get("threads"),
          .fused = config.get("fused") == 1,
          .form = form_of(problem),
          .vector = &vector_kernels(facts.arch)};
}

/// A lane's workspace, and the operands of its products.
class Lane {
 public:
  Lane(const Blocks& blocks, std::byte* scratch, std::size_t lane) : blocks_(blocks) {
    gate =
        reinterpret_cast<float*>(scratch) + lane * static_cast<std::size_t>(blocks.lane_floats());
    up = gate + blocks.tokens * blocks.inter;
    tokens_ = up + blocks.tokens * blocks.inter;
    const std::int64_t depth =
        blocks.fused ? blocks.shape.d : std::max(blocks.shape.d, blocks.shape.h);
    weights_ = tokens_ + blocks.tokens * depth;
  }

  float* gate;  // [tokens, inter] of the block
  float* up;

  MatrixView tokens(const void* tensor, std::int64_t row, std::int64_t rows, std::int64_t depth) {
    return view(tensor, row, rows, 0, depth, depth, tokens_);
  }
  /// Rows [row, row + rows) and columns [column, column + columns) of weights with `depth` columns.
  MatrixView weights(const void* tensor, std::int64_t row, std::int64_t rows, std::int64_t column,
                     std::int64_t columns, std::int64_t depth) {
    return view(tensor, row, rows, column, columns, depth, weights_);
  }

 private:
  MatrixView view(const void* tensor, std::int64_t row, std::int64_t rows, std::int64_t column,
                  std::int64_t columns, std::int64_t depth, float* wide) const {
    const std::int64_t at = row * depth + column;
    if (blocks_.dtype == DType::f32) return {static_cast<const float*>(tensor) + at, depth};
    const auto* from = static_cast<const std::uint16_t*>(tensor) + at;
    for (std::int64_t i = 0; i < rows; ++i)
      blocks_.vector->widen(from + i * depth, wide + i * columns,
                            static_cast<std::size_t>(columns));
    return {wide, columns};
  }

  const Blocks& blocks_;
  float* tokens_;
  float* weights_;
};

/// act(gate) * up of a block, in place of gate, rounded to the dtype of the intermediate.
void activate_block(const Blocks& blocks, Lane& lane, std::int64_t elements) {
  const auto count = static_cast<std::size_t>(elements);
  blocks.vector->gated(blocks.activation, lane.gate, lane.up, lane.gate, count);
  if (blocks.dtype == DType::f32) return;
  auto* rounded = reinterpret_cast<std::uint16_t*>(lane.up);
  blocks.vector->narrow(lane.gate, rounded, count);
  blocks.vector->widen(rounded, lane.gate, count);
}

/// Copies a block of f32 into rows of a tensor with `columns` columns.
void store_block(const Blocks& blocks, const float* block, void* tensor, Range rows, Range columns,
                 std::int64_t stride) {
  for (std::int64_t row = rows.first; row < rows.last; ++row, block += columns.size()) {
    const std::int64_t at = row * stride + columns.first;
    if (blocks.dtype == DType::f32)
      std::copy_n(block, columns.size(), static_cast<float*>(tensor) + at);
    else
      blocks.vector->narrow(block, static_cast<std::uint16_t*>(tensor) + at,
                            static_cast<std::size_t>(columns.size()));
  }
}

void gate_up_block(const Blocks& blocks, const HostCall& call, Lane& lane, MatrixView x,
                   Range tokens, Range inter) {
  const std::int64_t d = blocks.shape.d;
  for (const auto& [weights, out] :
       {std::pair{blocks.places.w_gate, lane.gate}, {blocks.places.w_up, lane.up}})
    sgemm(tokens.size(), inter.size(), d, x,
          lane.weights(call.tensors[weights], inter.first, inter.size(), 0, d, d), 0, out,
          inter.size());
  if (blocks.form.saves)
    for (const auto& [block, place] :
         {std::pair{lane.gate, blocks.places.gate}, {lane.up, blocks.places.up}})
      store_block(blocks, block, call.tensors[place], tokens, inter, blocks.shape.h);
  activate_block(blocks, lane, tokens.size() * inter.size());
}

/// Adds bias and residual to sums of y: `count` of them, from column `column` of row `token` on.
void add_to_row(const Blocks& blocks, const HostCall& call, std::int64_t token, std::int64_t column,
                std::int64_t count, float* sums) {
  constexpr std::int64_t chunk = 256;
  float wide[chunk];
  const auto add = [&](bool adds, std::size_t place, std::int64_t at) {
    const auto* from = adds ? static_cast<const std::byte*>(call.tensors[place]) : nullptr;
    for (std::int64_t i = 0; adds && i < count; i += chunk) {
      const auto part = static_cast<std::size_t>(std::min(chunk, count - i));
      decode(blocks.dtype, from + static_cast<std::size_t>(at + i) * dtype_bytes(blocks.dtype),
             {wide, part});
      for (std::size_t j = 0; j < part; ++j) sums[static_cast<std::size_t>(i) + j] += wide[j];
    }
  };
  add(blocks.form.bias, blocks.places.b_down, column);
  add(blocks.form.residual, blocks.places.residual, token * blocks.shape.d + column);
}

/// scratch: lanes, then shares of y.
void run_fused(const Blocks& blocks, const HostCall& call) {
  const auto [m, d, h] = blocks.shape;
  const std::int64_t splits = blocks.splits();
  auto* y = static_cast<float*>(call.tensors[blocks.places.y]);
  auto* partial = blocks.sums_in_y() ? y : reinterpret_cast<float*>(call.scratch[1]);
  deal(call.parallel, blocks.threads, blocks.token_blocks() * splits,
       [&, d = d, h = h, m = m](std::size_t index, std::int64_t task) {
         Lane lane(blocks, call.scratch[0], index);
         const std::int64_t split = task % splits;
         const Range tokens = part_of(m, blocks.token_blocks(), task / splits);
         const Range own = part_of(blocks.inter_blocks(), splits, split);
         const auto x =
             lane.tokens(call.tensors[blocks.places.gate_up_x], tokens.first, tokens.size(), d);
         float* out = partial + (split * m + tokens.first) * d;
         for (std::int64_t block = own.first; block < own.last; ++block) {
           const Range inter = part_of(h, blocks.inter_blocks(), block);
           gate_up_block(blocks, call, lane, x, tokens, inter);
           const auto down =
               lane.weights(call.tensors[blocks.places.w_down], 0, d, inter.first, inter.size(), h);
           sgemm(tokens.size(), d, inter.size(), {lane.gate, inter.size()}, down,
                 block == own.first ? 0.0f : 1.0f, out, d);
         }
       });
  if (blocks.sums_in_y()) return;
  deal(call.parallel, blocks.threads, m, [&, m = m, d = d](std::size_t, std::int64_t row) {
    float* sum = partial + row * d;
    for (std::int64_t split = 1; split < splits; ++split)
      for (std::int64_t i = 0; i < d; ++i) sum[i] += sum[split * m * d + i];
    add_to_row(blocks, call, row, 0, d, sum);
    if (blocks.dtype == DType::f32)
      std::copy_n(sum, d, y + row * d);
    else
      blocks.vector->narrow(sum,
                            static_cast<std::uint16_t*>(call.tensors[blocks.places.y]) + row * d,
                            static_cast<std::size_t>(d));
  });
}

void run_gate_up(const Blocks& blocks, const HostCall& call) {
  const auto [m, d, h] = blocks.shape;
  const std::int64_t inter_blocks = blocks.inter_blocks();
  deal(call.parallel, blocks.threads, blocks.token_blocks() * inter_blocks,
       [&, m = m, d = d, h = h](std::size_t index, std::int64_t task) {
         Lane lane(blocks, call.scratch[0], index);
         const Range tokens = part_of(m, blocks.token_blocks(), task / inter_blocks);
         const Range inter = part_of(h, inter_blocks, task % inter_blocks);
         const auto x =
             lane.tokens(call.tensors[blocks.places.gate_up_x], tokens.first, tokens.size(), d);
         gate_up_block(blocks, call, lane, x, tokens, inter);
         store_block(blocks, lane.gate, call.tensors[blocks.places.hidden], tokens, inter, h);
       });
}

void run_down(const Blocks& blocks, const HostCall& call) {
  const auto [m, d, h] = blocks.shape;
  const std::int64_t row_blocks = ceil_of(d, blocks.inter);
  deal(call.parallel, blocks.threads, blocks.token_blocks() * row_blocks,
       [&, m = m, d = d, h = h](std::size_t index, std::int64_t task) {
         Lane lane(blocks, call.scratch[0], index);
         const Range tokens = part_of(m, blocks.token_blocks(), task / row_blocks);
         const Range rows = part_of(d, row_blocks, task % row_blocks);
         const auto hidden =
             lane.tokens(call.tensors[blocks.places.hidden], tokens.first, tokens.size(), h);
         const auto down =
             lane.weights(call.tensors[blocks.places.w_down], rows.first, rows.size(), 0, h, h);
         sgemm(tokens.size(), rows.size(), h, hidden, down, 0, lane.gate, rows.size());
         for (std::int64_t i = 0; i < tokens.size(); ++i)
           add_to_row(blocks, call, tokens.first + i, rows.first, rows.size(),
                      lane.gate + i * rows.size());
         store_block(blocks, lane.gate, call.tensors[blocks.places.y], tokens, rows, d);
       });
}

/// The forward pass, or gate_up alone, where a backward pass computes gate and up again.
class CpuBlas final : public Family {
 public:
  explicit CpuBlas(bool gate_up_alone) : alone_(gate_up_alone) {}
  std::string_view name() const override { return alone_ ? "cpu_gate_up_blas" : "cpu_blas"; }
  std::string_view summary() const override {
    return alone_ ? "blocks over OpenBLAS, gate and up and their activation per block"
                  : "blocks over OpenBLAS, gate, up and down fused per block or not";
  }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  std::vector<std::string> stages() const override {
    return alone_ ? std::vector<std::string>{stage_gate_up}
                  : std::vector<std::string>{stage_gate_up, stage_down};
  }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    if (alone_ && !recomputes(problem)) return recomputing_alone;
    if (!alone_ && problem.pass != "fwd") return forward_alone;
    if (is_quantised(problem)) return no_fp8;
    return std::nullopt;
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    const Shape shape = shape_of(problem);
    return Space()
        .parameter("block_m", "tokens of a block", up_to(shape.m, {32, 128, 512}))
        .parameter("block_n", "intermediate features of a block",
                   up_to(shape.h, {64, 128, 256, 512, 1024, 2048}))
        .parameter("threads", "threads, each with products of its own", thread_counts(shape, facts))
        .parameter("fused", "1: y is added up from block to block of the intermediate",
                   alone_ ? std::vector<std::int64_t>{0} : std::vector<std::int64_t>{0, 1})
        .constraint("the blocks of a thread take more than 256 MiB", [=](const Config& config) {
          return smallest(config) ||
                 blocks_of(problem, facts, config).lane_floats() * 4 <= most_lane_bytes;
        });
  }

  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    // Large blocks keep OpenBLAS's packing small beside its products; one block a thread at least.
    const Shape shape = shape_of(problem);
    const Space space = this->space(problem, facts);
    Config config{
        {"block_m", 32}, {"block_n", 64}, {"threads", facts.multiprocessors}, {"fused", 0}};
    for (const auto tokens : space.parameters()[0].numbers())
      for (const auto inter : space.parameters()[1].numbers()) {
        Config larger = config;
        larger.set("block_m", tokens);
        larger.set("block_n", inter);
        const auto blocks = ceil_of(shape.m, tokens) * ceil_of(shape.h, inter);
        if (blocks >= facts.multiprocessors && space.violations(larger).empty()) config = larger;
      }
    return config;
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Blocks blocks = blocks_of(problem, facts, config);
    const auto bytes = [](std::int64_t floats) {
      return static_cast<std::size_t>(floats) * sizeof(float);
    };
    Program program;
    program.host_tensors = blocks.places.count;
    program.scratch = {{bytes(blocks.threads * blocks.lane_floats()), false},
                       {bytes(blocks.partial_floats()), false}};
    program.steps.emplace_back(HostFunction([=, down = !alone_](const HostCall& call) {
      const BlasThreads one(1);
      if (blocks.fused) return run_fused(blocks, call);
      run_gate_up(blocks, call);
      if (down) run_down(blocks, call);
    }));
    return program;
  }

  std::vector<std::string> sources() const override {
    return {"ffn/cpu_blas.cpp", vector_kernel_source};
  }

 private:
  /// The smallest blocks are always allowed: there must be one that runs.
  static bool smallest(const Config& config) {
    return config.at("block_m") == 32 && config.at("block_n") == 64;
  }

  bool alone_;
};

}  // namespace

const Family& cpu_blas_family() {
  static const CpuBlas family(false);
  return family;
}
const Family& cpu_gate_up_blas_family() {
  static const CpuBlas family(true);
  return family;
}

}  // namespace fftune::ffn
