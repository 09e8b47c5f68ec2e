// A task of `cpu_tiles`: some rows of the weights by all tokens of a block, over the whole depth.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/common/activation.hpp"
#include "kernels/common/cpu_vector.hpp"
#include "kernels/ffn/cpu_work.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {

// Rows of a packed block lie this far apart beside their length, so that rows a power of two long
// do not fall into one set of the cache.
constexpr std::int64_t row_padding = 16;

inline std::size_t count_of(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

struct Tiles {
  Shape shape;
  Places places;
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

/// One of the two products: which weights a tile's rows are, and what becomes of its sums.
struct Stage {
  const void* first = nullptr;   // weights of the tile's first half of rows
  const void* second = nullptr;  // and of its second half
  std::int64_t step = 0;         // rows of `first` from one tile to the next
  std::int64_t second_row = 0;   // of `second`, for the tile's row 0 of `first`
  std::int64_t extent = 0;       // rows of the weights
  std::int64_t depth = 0;
  const float* panels = nullptr;  // [panel][depth][width]

  /// The weights and their row that row `i` of a tile stands for; beyond `extent` there is none.
  std::pair<const void*, std::int64_t> row(std::int64_t tile, std::int64_t i,
                                           std::int64_t tile_rows) const {
    const std::int64_t half = tile_rows / 2;
    if (i < half) return {first, tile * step + i};
    return {second, tile * step + second_row + i - half};
  }
};

/// Fetches the weights that a lane multiplies next into its caches, a few lines at a time, while it
/// multiplies: the first use of a row would otherwise wait for memory.
class Ahead {
 public:
  /// Rows of `tiles`, from column k on, `depth` columns; shared out over `steps` calls of advance.
  Ahead(const Tiles& plan, const Stage& stage, Range tiles, std::int64_t k, std::int64_t depth,
        std::int64_t steps);

  void advance();

 private:
  static constexpr std::int64_t line = 64;  // bytes of a cache line, or a part of one

  void begin_row();

  const Tiles& plan_;
  const Stage& stage_;
  Range tiles_;
  std::int64_t k_;
  std::int64_t depth_;
  std::int64_t element_ = 0;  // bytes
  std::int64_t lines_a_step_ = 0;
  std::int64_t tile_;
  std::int64_t row_ = 0;
  const char* at_ = nullptr;
  const char* end_ = nullptr;
};

/// A task: tiles [tiles.first, tiles.last) of a stage by panels [panels.first, panels.last).
class Task {
 public:
  Task(const Tiles& plan, const Stage& stage, float* lane, Range tiles, Range panels, Range next)
      : plan_(plan), stage_(stage), tiles_(tiles), panels_(panels), next_(next), packed_(lane) {
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
      Ahead ahead = after(k + depth);
      for (std::int64_t panel = panels_.first; panel < panels_.last; ++panel) {
        multiply(panel, k, depth, ahead);
        if (k + depth == stage_.depth) finish(panel);
      }
    }
  }

 private:
  /// What comes after the columns below k: the next columns, or the lane's next task, probably.
  Ahead after(std::int64_t k) const;
  float* packed_tile(std::int64_t tile) const {
    return packed_ + (tile - tiles_.first) * plan_.rows * plan_.packed_stride();
  }
  /// Whether some of the tile's rows are beyond the weights'.
  bool ragged(std::int64_t tile) const { return (tile + 1) * stage_.step > stage_.extent; }
  void pack(std::int64_t tile, std::int64_t k, std::int64_t depth, float* to) const;
  void multiply(std::int64_t panel, std::int64_t k, std::int64_t depth, Ahead& ahead) const;

  const Tiles& plan_;
  const Stage& stage_;
  Range tiles_;
  Range panels_;
  Range next_;  // tiles
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
  const auto tiles_of_task = [&](std::int64_t task) {
    const std::int64_t index = task / panel_tasks;
    return index < row_tasks ? part_of(tiles, row_tasks, index) : Range{};
  };
  deal(call.parallel, plan.threads, row_tasks * panel_tasks,
       [&](std::size_t lane, std::int64_t task) {
         body(Task(plan, stage, lanes + static_cast<std::int64_t>(lane) * plan.lane_floats(),
                   tiles_of_task(task), part_of(panels, panel_tasks, task % panel_tasks),
                   tiles_of_task(task + plan.threads)),
              tiles_of_task(task));
       });
}

}  // namespace fftune::ffn
