// Matrix products of our own, in tiles that the registers hold.
//
// Tokens are the vectors of a tile and weight rows its scalars. So x is packed once, into panels
// [d, tokens of a tile]; weights, row-major as they are, need no transposition, only a copy into
// the cache, which widens bf16; gate and up share a tile, whose activated product is already a
// piece of the intermediate's panels, as the second product wants them. A task takes some weight
// rows, all tokens of a block, and the depth in blocks whose panels stay in the L1 cache.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/common/activation.hpp"
#include "kernels/common/cpu_vector.hpp"
#include "kernels/ffn/cpu_tile_task.hpp"
#include "kernels/ffn/cpu_work.hpp"
#include "kernels/ffn/families.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {
namespace {

constexpr std::int64_t least_tokens = 5;
const std::vector<std::int64_t> token_blocks{128, 512, 1024};
const std::vector<std::int64_t> depth_blocks{256, 512, 1024, 2048};
Tiles tiles_of(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const VectorKernels& vector = vector_kernels(facts.arch);
  const auto rows = static_cast<std::int64_t>(vector.tile_rows);
  const auto width = static_cast<std::int64_t>(vector.tile_columns);
  return {.shape = shape_of(problem),
          .places = places_of(problem),
          .dtype = problem.dtype,
          .activation = parse_activation(problem.option("act")),
          .token_block = ceil_of(config.at("token_block"), width) * width,
          .row_block = ceil_of(config.at("row_block"), rows) * rows,
          .depth_block = config.at("depth_block"),
          .pack = config.at("pack") == 1,
          .threads = config.get("threads"),
          .vector = &vector,
          .rows = rows,
          .width = width};
}

/// x's tokens [tokens.first, tokens.last) as panels [panel][d][width], the last filled with zeros.
void pack_tokens(const Tiles& plan, const HostCall& call, Range tokens, float* panels) {
  const std::int64_t d = plan.shape.d, width = plan.width;
  deal(call.parallel, plan.threads, ceil_of(tokens.size(), width),
       [&](std::size_t, std::int64_t panel) {
         constexpr std::int64_t chunk = 64;
         float wide[chunk];
         const std::int64_t first = tokens.first + panel * width;
         const std::int64_t count = std::min(width, tokens.last - first);
         float* out = panels + panel * d * width;
         if (count < width) std::memset(out, 0, count_of(d * width) * sizeof(float));
         for (std::int64_t k = 0; k < d; k += chunk) {
           const std::int64_t columns = std::min(chunk, d - k);
           const std::int64_t at = first * d + k;
           if (plan.dtype == DType::f32) {
             plan.vector->transpose(
                 static_cast<const float*>(call.tensors[plan.places.gate_up_x]) + at, count_of(d),
                 out + k * width, count_of(width), count_of(count), count_of(columns));
             continue;
           }
           const auto* x =
               static_cast<const std::uint16_t*>(call.tensors[plan.places.gate_up_x]) + at;
           for (std::int64_t token = 0; token < count; ++token) {
             plan.vector->widen(x + token * d, wide, count_of(columns));
             for (std::int64_t i = 0; i < columns; ++i) out[(k + i) * width + token] = wide[i];
           }
         }
       });
}

/// hidden, as panels [panel][h][width], rounded to the dtype.
void gate_up(const Tiles& plan, const HostCall& call, std::int64_t panels, const float* x,
             float* hidden) {
  const std::int64_t half = plan.rows / 2, width = plan.width, h = plan.shape.h;
  const Stage stage{.first = call.tensors[tensor::w_gate],
                    .second = call.tensors[tensor::w_up],
                    .step = half,
                    .second_row = 0,
                    .extent = h,
                    .depth = plan.shape.d,
                    .panels = x};
  for_tasks(plan, stage, panels, call, [&](Task task, Range tiles) {
    task.run([&](std::int64_t panel) {
      float* sums = task.sums(panel);
      for (std::int64_t tile = tiles.first; tile < tiles.last; ++tile) {
        const std::int64_t row = tile * half;
        const std::size_t count = count_of(std::min(half, h - row) * width);
        float* out = hidden + (panel * h + row) * width;
        plan.vector->gated(plan.activation, sums, sums + half * width, out, count);
        if (plan.dtype == DType::bf16) {
          auto* rounded = reinterpret_cast<std::uint16_t*>(sums);
          plan.vector->narrow(out, rounded, count);
          plan.vector->widen(rounded, out, count);
        }
        sums += plan.rows * width;
      }
    });
  });
}

void down(const Tiles& plan, const HostCall& call, Range tokens, std::int64_t panels,
          const float* hidden) {
  const std::int64_t width = plan.width, d = plan.shape.d;
  const Stage stage{.first = call.tensors[tensor::w_down],
                    .second = call.tensors[tensor::w_down],
                    .step = plan.rows,
                    .second_row = plan.rows / 2,
                    .extent = d,
                    .depth = plan.shape.h,
                    .panels = hidden};
  for_tasks(plan, stage, panels, call, [&](Task task, Range tiles) {
    const std::int64_t row = tiles.first * plan.rows;
    const std::int64_t rows = std::min(d, tiles.last * plan.rows) - row;
    task.run([&](std::int64_t panel) {
      const std::int64_t token = tokens.first + panel * width;
      const std::int64_t count = std::min(width, tokens.last - token);
      const std::int64_t at = token * d + row;
      if (plan.dtype == DType::f32)
        return plan.vector->transpose(task.sums(panel), count_of(width),
                                      static_cast<float*>(call.tensors[plan.places.y]) + at,
                                      count_of(d), count_of(rows), count_of(count));
      float* wide = task.spare();
      plan.vector->transpose(task.sums(panel), count_of(width), wide, count_of(rows),
                             count_of(rows), count_of(count));
      for (std::int64_t i = 0; i < count; ++i)
        plan.vector->narrow(wide + i * rows,
                            static_cast<std::uint16_t*>(call.tensors[plan.places.y]) + at + i * d,
                            count_of(rows));
    });
  });
}

class CpuTiles final : public Family {
 public:
  std::string_view name() const override { return "cpu_tiles"; }
  std::string_view summary() const override {
    return "register tiles of our own: packed tokens, gate and up fused with the activation";
  }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  std::vector<std::string> stages() const override { return {stage_gate_up, stage_down}; }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    if (problem.pass != "fwd") return forward_alone;
    if (is_quantised(problem)) return no_fp8;
    if (!form_of(problem).plain()) return plain_alone;
    if (problem.size("m") >= least_tokens) return std::nullopt;
    return "fewer than 5 tokens leave most of a tile's vectors empty";
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    const Shape shape = shape_of(problem);
    const std::int64_t deepest = std::max(shape.d, shape.h);
    return Space()
        .parameter("token_block", "tokens that go through both products at once",
                   up_to(shape.m, token_blocks))
        .parameter("row_block", "weight rows of a task", {24, 96})
        .parameter("depth_block", "depth of a task's packed rows", up_to(deepest, depth_blocks))
        .parameter("pack", "1: weights are copied into the cache, 0: read where they are", {0, 1})
        .parameter("threads", "threads", thread_counts(shape, facts))
        .constraint("bf16 weights are widened as they are copied",
                    [bf16 = problem.dtype == DType::bf16](const Config& config) {
                      return !bf16 || config.at("pack") == 1;
                    });
  }

  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    // f32 is read in place, as deep as its sums need no second visit for most layers. What is
    // copied anyway is copied in blocks that leave the L1 cache to the panels.
    const bool copied = problem.dtype != DType::f32;
    const Shape shape = shape_of(problem);
    const auto tokens = up_to(std::min<std::int64_t>(shape.m, 512), token_blocks);
    const auto depths = up_to(
        std::min<std::int64_t>(std::max(shape.d, shape.h), copied ? 512 : 1024), depth_blocks);
    return {{"token_block", tokens.back()},
            {"row_block", 24},
            {"depth_block", depths.back()},
            {"pack", copied ? 1 : 0},
            {"threads", facts.multiprocessors}};
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Tiles plan = tiles_of(problem, facts, config);
    const std::int64_t block_tokens = plan.block_panels() * plan.width;
    const auto bytes = [](std::int64_t floats) { return count_of(floats) * sizeof(float); };
    Program program;
    program.host_tensors = plan.places.count;
    program.scratch = {{bytes(block_tokens * plan.shape.d), false},
                       {bytes(block_tokens * plan.shape.h), false},
                       {bytes(plan.threads * plan.lane_floats()), false}};
    program.steps.emplace_back(HostFunction([plan](const HostCall& call) {
      auto* x = reinterpret_cast<float*>(call.scratch[0]);
      auto* hidden = reinterpret_cast<float*>(call.scratch[1]);
      const std::int64_t blocks = ceil_of(plan.panels(), plan.block_panels());
      for (std::int64_t block = 0; block < blocks; ++block) {
        const Range panels = part_of(plan.panels(), blocks, block);
        const Range tokens{panels.first * plan.width,
                           std::min(plan.shape.m, panels.last * plan.width)};
        pack_tokens(plan, call, tokens, x);
        gate_up(plan, call, panels.size(), x, hidden);
        down(plan, call, tokens, panels.size(), hidden);
      }
    }));
    return program;
  }

  std::vector<std::string> sources() const override {
    return {"ffn/cpu_tiles.cpp", "ffn/cpu_tile_task.cpp", "ffn/cpu_tile_task.hpp",
            vector_kernel_source};
  }
};

}  // namespace

const Family& cpu_tiles_family() {
  static const CpuTiles family;
  return family;
}

}  // namespace fftune::ffn
