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
#include "kernels/ffn/cpu_work.hpp"
#include "kernels/ffn/families.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {
namespace {

constexpr std::int64_t least_tokens = 5;
// Rows of a packed block lie this far apart beside their length, so that rows a power of two long
// do not fall into one set of the cache.
constexpr std::int64_t row_padding = 16;

std::size_t count_of(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

struct Tiles {
  Shape shape;
  DType dtype = DType::f32;
  Activation activation = Activation::silu;
  std::int64_t token_block = 0;  // tokens of a block, in whole panels
  std::int64_t row_block = 0;    // weight rows of a task, in whole tiles
  std::int64_t depth_block = 0;
  bool pack = true;
  int threads = 1;
  const VectorKernels* vector = nullptr;
  std::int64_t rows = 0;   // of a tile
  std::int64_t width = 0;  // tokens of a tile and panel

  std::int64_t panels() const { return ceil_of(shape.m, width); }
  std::int64_t block_panels() const { return std::min(panels(), token_block / width); }
  std::int64_t deepest() const { return std::max(shape.d, shape.h); }
  std::int64_t packed_stride() const { return std::min(depth_block, deepest()) + row_padding; }
  std::int64_t packed_rows() const { return pack ? row_block : rows; }
  /// The sums of a task, kept from one block of the depth to the next.
  std::int64_t sum_floats() const {
    return row_block * width * (deepest() > depth_block ? block_panels() : 1);
  }
  /// A lane's packed rows, sums, and a tile's width of its rows of y.
  std::int64_t lane_floats() const {
    return packed_rows() * packed_stride() + sum_floats() + row_block * width;
  }
};

Tiles tiles_of(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const VectorKernels& vector = vector_kernels(facts.arch);
  const auto rows = static_cast<std::int64_t>(vector.tile_rows);
  const auto width = static_cast<std::int64_t>(vector.tile_columns);
  return {.shape = shape_of(problem),
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

/// One of the two products: which weights a tile's rows are, and what becomes of its sums.
struct Stage {
  const void* first = nullptr;   // weights of the tile's first half of rows
  const void* second = nullptr;  // and of its second half
  std::int64_t step = 0;         // rows of `first` from one tile to the next
  std::int64_t second_row = 0;   // of `second`, for the tile's row 0 of `first`
  std::int64_t extent = 0;       // rows of the weights
  std::int64_t depth = 0;
  const float* panels = nullptr;  // [panel][depth][width]
};

/// A task: tiles [tiles.first, tiles.last) of a stage by panels [panels.first, panels.last).
class Task {
 public:
  Task(const Tiles& plan, const Stage& stage, float* lane, Range tiles, Range panels)
      : plan_(plan), stage_(stage), tiles_(tiles), panels_(panels), packed_(lane) {
    sums_ = packed_ + plan.packed_rows() * plan.packed_stride();
  }

  /// Where the rows of a panel's sums are: [tile][row][width].
  float* sums(std::int64_t panel) const {
    const std::int64_t kept = stage_.depth > plan_.depth_block ? panel - panels_.first : 0;
    return sums_ + kept * tiles_.size() * plan_.rows * plan_.width;
  }

  /// Room for row_block * width floats.
  float* spare() const { return sums_ + plan_.sum_floats(); }

  /// Calls finish(panel) for each panel once its sums are complete.
  template <typename Finish>
  void run(const Finish& finish) {
    for (std::int64_t k = 0; k < stage_.depth; k += plan_.depth_block) {
      const std::int64_t depth = std::min(plan_.depth_block, stage_.depth - k);
      if (plan_.pack)
        for (std::int64_t tile = tiles_.first; tile < tiles_.last; ++tile)
          pack(tile, k, depth, packed_tile(tile));
      else if (ragged(tiles_.last - 1))
        pack(tiles_.last - 1, k, depth, packed_);
      for (std::int64_t panel = panels_.first; panel < panels_.last; ++panel) {
        multiply(panel, k, depth);
        if (k + depth == stage_.depth) finish(panel);
      }
    }
  }

 private:
  float* packed_tile(std::int64_t tile) const {
    return packed_ + (tile - tiles_.first) * plan_.rows * plan_.packed_stride();
  }
  /// Whether some of the tile's rows are beyond the weights'.
  bool ragged(std::int64_t tile) const { return (tile + 1) * stage_.step > stage_.extent; }

  void pack(std::int64_t tile, std::int64_t k, std::int64_t depth, float* to) const {
    const std::int64_t half = plan_.rows / 2;
    for (std::int64_t i = 0; i < plan_.rows; ++i, to += plan_.packed_stride()) {
      const bool upper = i >= half;
      const std::int64_t row = tile * stage_.step + (upper ? stage_.second_row + i - half : i);
      const void* weights = upper ? stage_.second : stage_.first;
      if (row >= stage_.extent)
        std::memset(to, 0, count_of(depth) * sizeof(float));
      else if (plan_.dtype == DType::f32)
        std::memcpy(to, static_cast<const float*>(weights) + row * stage_.depth + k,
                    count_of(depth) * sizeof(float));
      else
        plan_.vector->widen(static_cast<const std::uint16_t*>(weights) + row * stage_.depth + k, to,
                            count_of(depth));
    }
  }

  void multiply(std::int64_t panel, std::int64_t k, std::int64_t depth) const {
    const float* tokens = stage_.panels + (panel * stage_.depth + k) * plan_.width;
    float* out = sums(panel);
    for (std::int64_t tile = tiles_.first; tile < tiles_.last; ++tile) {
      const float* first = nullptr;
      const float* second = nullptr;
      std::int64_t stride = plan_.packed_stride();
      if (plan_.pack || ragged(tile)) {
        first = plan_.pack ? packed_tile(tile) : packed_;
        second = first + plan_.rows / 2 * stride;
      } else {
        stride = stage_.depth;
        const std::int64_t row = tile * stage_.step;
        first = static_cast<const float*>(stage_.first) + row * stride + k;
        second = static_cast<const float*>(stage_.second) + (row + stage_.second_row) * stride + k;
      }
      plan_.vector->tile(first, second, count_of(stride), tokens, count_of(depth), k > 0, out);
      out += plan_.rows * plan_.width;
    }
  }

  const Tiles& plan_;
  const Stage& stage_;
  Range tiles_;
  Range panels_;
  float* packed_;
  float* sums_;
};

/// Deals the tasks of a stage: as many as keep every thread busy, equal to within one tile.
template <typename Body>
void for_tasks(const Tiles& plan, const Stage& stage, std::int64_t panels, const HostCall& call,
               const Body& body) {
  const std::int64_t tiles = ceil_of(stage.extent, stage.step);
  const std::int64_t blocks = ceil_of(tiles, plan.row_block / plan.rows);
  const std::int64_t row_tasks = std::min(tiles, ceil_of(blocks, plan.threads) * plan.threads);
  const std::int64_t panel_tasks = std::min(panels, ceil_of(plan.threads, row_tasks));
  auto* lanes = reinterpret_cast<float*>(call.scratch[2]);
  deal(call.parallel, plan.threads, row_tasks * panel_tasks,
       [&](std::size_t lane, std::int64_t task) {
         body(Task(plan, stage, lanes + static_cast<std::int64_t>(lane) * plan.lane_floats(),
                   part_of(tiles, row_tasks, task / panel_tasks),
                   part_of(panels, panel_tasks, task % panel_tasks)),
              part_of(tiles, row_tasks, task / panel_tasks));
       });
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
             plan.vector->transpose(static_cast<const float*>(call.tensors[tensor::x]) + at,
                                    count_of(d), out + k * width, count_of(width), count_of(count),
                                    count_of(columns));
             continue;
           }
           const auto* x = static_cast<const std::uint16_t*>(call.tensors[tensor::x]) + at;
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
                                      static_cast<float*>(call.tensors[tensor::y]) + at,
                                      count_of(d), count_of(rows), count_of(count));
      float* wide = task.spare();
      plan.vector->transpose(task.sums(panel), count_of(width), wide, count_of(rows),
                             count_of(rows), count_of(count));
      for (std::int64_t i = 0; i < count; ++i)
        plan.vector->narrow(wide + i * rows,
                            static_cast<std::uint16_t*>(call.tensors[tensor::y]) + at + i * d,
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
    if (problem.size("m") >= least_tokens) return std::nullopt;
    return "fewer than 5 tokens leave most of a tile's vectors empty";
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    const Shape shape = shape_of(problem);
    const std::int64_t deepest = std::max(shape.d, shape.h);
    return Space()
        .parameter("token_block", "tokens that go through both products at once",
                   up_to(shape.m, {64, 128, 256, 512, 1024}))
        .parameter("row_block", "weight rows of a task", {24, 48, 96, 192})
        .parameter("depth_block", "depth of a task's packed rows",
                   up_to(deepest, {128, 256, 512, 1024}))
        .parameter("pack", "1: weights are copied into the cache, 0: read where they are", {0, 1})
        .parameter("threads", "threads", thread_counts(shape, facts))
        .constraint("bf16 weights are widened as they are copied",
                    [bf16 = problem.dtype == DType::bf16](const Config& config) {
                      return !bf16 || config.at("pack") == 1;
                    });
  }

  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    // A panel 256 deep is half of a 32 KiB L1 cache (AVX2: 16 tokens in fp32), and the packed rows
    // and the sums of 512 tokens share a 512 KiB L2.
    const Shape shape = shape_of(problem);
    const auto tokens = up_to(shape.m, {64, 128, 256, 512});
    const auto depths = up_to(std::max(shape.d, shape.h), {128, 256});
    return {{"token_block", tokens.back()},
            {"row_block", 96},
            {"depth_block", depths.back()},
            {"pack", 1},
            {"threads", facts.multiprocessors}};
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Tiles plan = tiles_of(problem, facts, config);
    const std::int64_t block_tokens = plan.block_panels() * plan.width;
    const auto bytes = [](std::int64_t floats) { return count_of(floats) * sizeof(float); };
    Program program;
    program.host_tensors = tensor::count;
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
    return {"ffn/cpu_tiles.cpp", vector_kernel_source};
  }
};

}  // namespace

const Family& cpu_tiles_family() {
  static const CpuTiles family;
  return family;
}

}  // namespace fftune::ffn
