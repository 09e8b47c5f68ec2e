// GEMMs with register tiles, without a BLAS.
//
// In a tile, tokens are along the vector and weight rows are broadcast scalars. So x is packed
// once, into panels [d, tokens of a tile]. Row-major weights need no transposition, only a copy
// into the cache, which widens bf16. Gate and up share a tile, whose activated result is already in
// the panel layout that the second GEMM reads. A task takes some weight rows, all tokens of a
// block, and the depth in blocks whose panels stay in the L1 cache.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/common/cpu_vector.hpp"
#include "kernels/gemm/cpu/host_gemm.hpp"
#include "kernels/gemm/cpu/work.hpp"
#include "kernels/gemm/engine.hpp"

namespace fftune {
namespace {

using namespace gemm_cpu;

constexpr std::int64_t least_tokens = 5;
const std::vector<std::int64_t> token_blocks{128, 512, 1024};
const std::vector<std::int64_t> depth_blocks{256, 512, 1024, 2048};

// Rows of a packed block lie this far apart beside their length, so that rows a power of two long
// do not fall into one set of the cache.
constexpr std::int64_t row_padding = 16;

inline std::size_t count_of(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

struct Tiles {
  GatedChain layer;
  std::int64_t token_block = 0;  // tokens of a block, in whole panels
  std::int64_t row_block = 0;    // weight rows of a task, in whole tiles
  std::int64_t depth_block = 0;
  bool pack = true;
  int threads = 1;
  std::size_t scratch = 0;  // the program's first one of this engine
  const VectorKernels* vector = nullptr;
  std::int64_t rows = 0;   // of a tile
  std::int64_t width = 0;  // tokens of a tile and panel

  std::int64_t panels() const { return ceil_div(layer.m, width); }
  std::int64_t block_panels() const { return std::min(panels(), token_block / width); }
  std::int64_t deepest() const { return std::max(layer.d, layer.h); }
  std::int64_t packed_stride() const { return std::min(depth_block, deepest()) + row_padding; }
  std::int64_t packed_rows() const { return pack ? row_block : rows; }
  /// The accumulators of a task, carried from one block of k to the next.
  std::int64_t sum_floats() const {
    return row_block * width * (deepest() > depth_block ? block_panels() : 1);
  }
  /// A worker's packed rows, accumulators, and one tile width of its rows of y.
  std::int64_t worker_floats() const {
    return packed_rows() * packed_stride() + sum_floats() + row_block * width;
  }
};

/// One of the two GEMMs: the weights of a tile's rows, and the epilogue of its accumulators.
struct Product {
  const void* first = nullptr;   // weights of the tile's first half of rows
  const void* second = nullptr;  // and of its second half
  std::int64_t step = 0;         // rows of `first` from one tile to the next
  std::int64_t second_row = 0;   // of `second`, for the tile's row 0 of `first`
  std::int64_t extent = 0;       // rows of the weights
  std::int64_t depth = 0;
  const float* panels = nullptr;  // [panel][depth][width]

  /// The weight row of row `i` of a tile; none beyond `extent`.
  std::pair<const void*, std::int64_t> row(std::int64_t tile, std::int64_t i,
                                           std::int64_t tile_rows) const {
    const std::int64_t half = tile_rows / 2;
    if (i < half) return {first, tile * step + i};
    return {second, tile * step + second_row + i - half};
  }
};

/// Prefetches the next weights of a worker into its caches, a few lines at a time, while it
/// computes: the first use of a row would otherwise wait for memory.
class Ahead {
 public:
  /// Rows of `tiles`, from column k on, `depth` columns, spread over `steps` calls of advance.
  Ahead(const Tiles& plan, const Product& product, Range tiles, std::int64_t k, std::int64_t depth,
        std::int64_t steps);

  void advance();

 private:
  static constexpr std::int64_t line = 64;  // bytes of a cache line, or a part of one

  void begin_row();

  const Tiles& plan_;
  const Product& product_;
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

/// A task: tiles [tiles.first, tiles.last) of a product by panels [panels.first, panels.last).
class Task {
 public:
  Task(const Tiles& plan, const Product& product, float* worker, Range tiles, Range panels,
       Range next)
      : plan_(plan),
        product_(product),
        tiles_(tiles),
        panels_(panels),
        next_(next),
        packed_(worker) {
    sums_ = packed_ + plan.packed_rows() * plan.packed_stride();
  }

  /// Where the rows of a panel's sums are: [tile][row][width].
  float* sums(std::int64_t panel) const {
    const std::int64_t kept = product_.depth > plan_.depth_block ? panel - panels_.first : 0;
    return sums_ + kept * tiles_.size() * plan_.rows * plan_.width;
  }

  /// Room for row_block * width floats.
  float* spare() const { return sums_ + plan_.sum_floats(); }

  /// Calls finish(panel) for each panel once its sums are complete.
  template <typename Finish>
  void run(const Finish& finish) {
    for (std::int64_t k = 0; k < product_.depth; k += plan_.depth_block) {
      const std::int64_t depth = std::min(plan_.depth_block, product_.depth - k);
      if (plan_.pack)
        for (std::int64_t tile = tiles_.first; tile < tiles_.last; ++tile)
          pack(tile, k, depth, packed_tile(tile));
      else if (ragged(tiles_.last - 1))
        pack(tiles_.last - 1, k, depth, packed_);
      Ahead ahead = after(k + depth);
      for (std::int64_t panel = panels_.first; panel < panels_.last; ++panel) {
        multiply(panel, k, depth, ahead);
        if (k + depth == product_.depth) finish(panel);
      }
    }
  }

 private:
  /// The columns after those below k: the next ones, or probably those of the worker's next task.
  Ahead after(std::int64_t k) const;
  float* packed_tile(std::int64_t tile) const {
    return packed_ + (tile - tiles_.first) * plan_.rows * plan_.packed_stride();
  }
  /// Whether some of the tile's rows are beyond the weights'.
  bool ragged(std::int64_t tile) const { return (tile + 1) * product_.step > product_.extent; }
  void pack(std::int64_t tile, std::int64_t k, std::int64_t depth, float* to) const;
  void multiply(std::int64_t panel, std::int64_t k, std::int64_t depth, Ahead& ahead) const;

  const Tiles& plan_;
  const Product& product_;
  Range tiles_;
  Range panels_;
  Range next_;  // tiles
  float* packed_;
  float* sums_;
};

/// Deals the tasks of a product: as many as keep every thread busy, equal to within one tile.
template <typename Body>
void for_tasks(const Tiles& plan, const Product& product, std::int64_t panels, const HostCall& call,
               const Body& body) {
  const std::int64_t tiles = ceil_div(product.extent, product.step);
  const std::int64_t blocks = ceil_div(tiles, plan.row_block / plan.rows);
  const std::int64_t row_tasks = std::min(tiles, ceil_div(blocks, plan.threads) * plan.threads);
  const std::int64_t panel_tasks = std::min(panels, ceil_div(plan.threads, row_tasks));
  auto* workers = reinterpret_cast<float*>(call.scratch[plan.scratch + 2]);
  const auto tiles_of_task = [&](std::int64_t task) {
    const std::int64_t index = task / panel_tasks;
    return index < row_tasks ? part_of(tiles, row_tasks, index) : Range{};
  };
  deal(call.parallel, plan.threads, row_tasks * panel_tasks,
       [&](std::size_t worker, std::int64_t task) {
         body(
             Task(plan, product, workers + static_cast<std::int64_t>(worker) * plan.worker_floats(),
                  tiles_of_task(task), part_of(panels, panel_tasks, task % panel_tasks),
                  tiles_of_task(task + plan.threads)),
             tiles_of_task(task));
       });
}

Ahead::Ahead(const Tiles& plan, const Product& product, Range tiles, std::int64_t k,
             std::int64_t depth, std::int64_t steps)
    : plan_(plan), product_(product), tiles_(tiles), k_(k), depth_(depth), tile_(tiles.first) {
  element_ = static_cast<std::int64_t>(dtype_bytes(plan.layer.dtype));
  const std::int64_t lines = tiles.size() * plan.rows * ceil_div(depth * element_, line);
  lines_a_step_ = ceil_div(lines, steps);
  begin_row();
}

void Ahead::advance() {
  for (std::int64_t i = 0; i < lines_a_step_ && at_ != nullptr; ++i) {
    __builtin_prefetch(at_);
    at_ += line;
    if (at_ < end_) continue;
    if (++row_ == plan_.rows) {
      row_ = 0;
      ++tile_;
    }
    begin_row();
  }
}

void Ahead::begin_row() {
  at_ = nullptr;
  if (tile_ >= tiles_.last) return;
  const auto [weights, row] = product_.row(tile_, row_, plan_.rows);
  if (row >= product_.extent) return;
  at_ = static_cast<const char*>(weights) + (row * product_.depth + k_) * element_;
  end_ = at_ + depth_ * element_;
}

Ahead Task::after(std::int64_t k) const {
  const bool same = k < product_.depth;
  const std::int64_t from = same ? k : 0;
  return {plan_,
          product_,
          same ? tiles_ : next_,
          from,
          std::min(plan_.depth_block, product_.depth - from),
          tiles_.size() * panels_.size()};
}

void Task::pack(std::int64_t tile, std::int64_t k, std::int64_t depth, float* to) const {
  for (std::int64_t i = 0; i < plan_.rows; ++i, to += plan_.packed_stride()) {
    const auto [weights, row] = product_.row(tile, i, plan_.rows);
    if (row >= product_.extent)
      std::memset(to, 0, count_of(depth) * sizeof(float));
    else if (plan_.layer.dtype == DType::f32)
      std::memcpy(to, static_cast<const float*>(weights) + row * product_.depth + k,
                  count_of(depth) * sizeof(float));
    else
      plan_.vector->widen(static_cast<const std::uint16_t*>(weights) + row * product_.depth + k, to,
                          count_of(depth));
  }
}

void Task::multiply(std::int64_t panel, std::int64_t k, std::int64_t depth, Ahead& ahead) const {
  const float* tokens = product_.panels + (panel * product_.depth + k) * plan_.width;
  float* out = sums(panel);
  for (std::int64_t tile = tiles_.first; tile < tiles_.last; ++tile) {
    const float* first = nullptr;
    const float* second = nullptr;
    std::int64_t stride = plan_.packed_stride();
    if (plan_.pack || ragged(tile)) {
      first = plan_.pack ? packed_tile(tile) : packed_;
      second = first + plan_.rows / 2 * stride;
    } else {
      stride = product_.depth;
      const std::int64_t row = tile * product_.step;
      first = static_cast<const float*>(product_.first) + row * stride + k;
      second =
          static_cast<const float*>(product_.second) + (row + product_.second_row) * stride + k;
    }
    plan_.vector->tile(first, second, count_of(stride), tokens, count_of(depth), k > 0, out);
    ahead.advance();
    out += plan_.rows * plan_.width;
  }
}

/// x's tokens [tokens.first, tokens.last) as panels [panel][d][width], the last filled with zeros.
void pack_tokens(const Tiles& plan, const HostCall& call, Range tokens, float* panels) {
  const std::int64_t d = plan.layer.d, width = plan.width;
  deal(call.parallel, plan.threads, ceil_div(tokens.size(), width),
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
           if (plan.layer.dtype == DType::f32) {
             plan.vector->transpose(static_cast<const float*>(call.tensors[plan.layer.x]) + at,
                                    count_of(d), out + k * width, count_of(width), count_of(count),
                                    count_of(columns));
             continue;
           }
           const auto* x = static_cast<const std::uint16_t*>(call.tensors[plan.layer.x]) + at;
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
  const std::int64_t half = plan.rows / 2, width = plan.width, h = plan.layer.h;
  const Product product{.first = call.tensors[plan.layer.w_gate],
                        .second = call.tensors[plan.layer.w_up],
                        .step = half,
                        .second_row = 0,
                        .extent = h,
                        .depth = plan.layer.d,
                        .panels = x};
  for_tasks(plan, product, panels, call, [&](Task task, Range tiles) {
    task.run([&](std::int64_t panel) {
      float* sums = task.sums(panel);
      for (std::int64_t tile = tiles.first; tile < tiles.last; ++tile) {
        const std::int64_t row = tile * half;
        const std::size_t count = count_of(std::min(half, h - row) * width);
        float* out = hidden + (panel * h + row) * width;
        plan.vector->gated(plan.layer.activation, sums, sums + half * width, out, count);
        if (plan.layer.dtype == DType::bf16) {
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
  const std::int64_t width = plan.width, d = plan.layer.d;
  const Product product{.first = call.tensors[plan.layer.w_down],
                        .second = call.tensors[plan.layer.w_down],
                        .step = plan.rows,
                        .second_row = plan.rows / 2,
                        .extent = d,
                        .depth = plan.layer.h,
                        .panels = hidden};
  for_tasks(plan, product, panels, call, [&](Task task, Range tiles) {
    const std::int64_t row = tiles.first * plan.rows;
    const std::int64_t rows = std::min(d, tiles.last * plan.rows) - row;
    task.run([&](std::int64_t panel) {
      const std::int64_t token = tokens.first + panel * width;
      const std::int64_t count = std::min(width, tokens.last - token);
      const std::int64_t at = token * d + row;
      if (plan.layer.dtype == DType::f32)
        return plan.vector->transpose(task.sums(panel), count_of(width),
                                      static_cast<float*>(call.tensors[plan.layer.y]) + at,
                                      count_of(d), count_of(rows), count_of(count));
      float* wide = task.spare();
      plan.vector->transpose(task.sums(panel), count_of(width), wide, count_of(rows),
                             count_of(rows), count_of(count));
      for (std::int64_t i = 0; i < count; ++i)
        plan.vector->narrow(wide + i * rows,
                            static_cast<std::uint16_t*>(call.tensors[plan.layer.y]) + at + i * d,
                            count_of(rows));
    });
  });
}

Tiles tiles_of(const GatedChain& layer, const DeviceFacts& facts, const Config& config) {
  const VectorKernels& vector = vector_kernels(facts.arch);
  const auto rows = static_cast<std::int64_t>(vector.tile_rows);
  const auto width = static_cast<std::int64_t>(vector.tile_columns);
  return {.layer = layer,
          .token_block = ceil_div(config.at("token_block"), width) * width,
          .row_block = ceil_div(config.at("row_block"), rows) * rows,
          .depth_block = config.at("depth_block"),
          .pack = config.at("pack") == 1,
          .threads = config.get("threads"),
          .vector = &vector,
          .rows = rows,
          .width = width};
}

std::optional<std::string> can_implement(const GemmChain& chain, const DeviceFacts&) {
  if (auto reason = refuse_gated_chain(chain)) return reason;
  if (chain[0].m >= least_tokens) return std::nullopt;
  return "fewer than 5 tokens leave most of a tile's vectors empty";
}

Space space(const GemmChain& chain, const DeviceFacts& facts) {
  const std::int64_t deepest = std::max(chain[0].k, chain[0].n);
  return Space()
      .parameter("token_block", "tokens that go through both products at once",
                 up_to(chain[0].m, token_blocks))
      .parameter("row_block", "weight rows of a task", {24, 96})
      .parameter("depth_block", "depth of a task's packed rows", up_to(deepest, depth_blocks))
      .parameter("pack", "1: weights are copied into the cache, 0: read where they are", {0, 1})
      .parameter("threads", "threads", thread_counts(chain, facts))
      .constraint("bf16 weights need pack=1, whose copy widens them",
                  [is_bf16 = chain[0].dtype == DType::bf16](const Config& config) {
                    return !is_bf16 || config.at("pack") == 1;
                  });
}

Config default_config(const GemmChain& chain, const DeviceFacts& facts) {
  // f32 is read in place, with blocks so deep that most layers need no second pass over their sums.
  // Operands that are copied anyway are copied in blocks that leave the L1 cache to the panels.
  const bool is_copied = chain[0].dtype != DType::f32;
  const std::int64_t deepest = std::max(chain[0].k, chain[0].n);
  const auto tokens = up_to(std::min<std::int64_t>(chain[0].m, 512), token_blocks);
  const auto depths = up_to(std::min<std::int64_t>(deepest, is_copied ? 512 : 1024), depth_blocks);
  return {{"token_block", tokens.back()},
          {"row_block", 24},
          {"depth_block", depths.back()},
          {"pack", is_copied ? 1 : 0},
          {"threads", default_threads(chain, facts)}};
}

void append(Program& program, const GemmChain& chain, const TensorPlaces& places,
            const DeviceFacts& facts, const Config& config) {
  Tiles plan = tiles_of(gated_chain(chain, places), facts, config);
  plan.scratch = program.scratch.size();
  const std::int64_t block_tokens = plan.block_panels() * plan.width;
  for (const std::int64_t floats : {block_tokens * plan.layer.d, block_tokens * plan.layer.h,
                                    plan.threads * plan.worker_floats()})
    program.scratch.push_back({bytes_of_floats(floats), false});
  program.steps.emplace_back(HostFunction([plan](const HostCall& call) {
    auto* x = reinterpret_cast<float*>(call.scratch[plan.scratch]);
    auto* hidden = reinterpret_cast<float*>(call.scratch[plan.scratch + 1]);
    const std::int64_t blocks = ceil_div(plan.panels(), plan.block_panels());
    for (std::int64_t block = 0; block < blocks; ++block) {
      const Range panels = part_of(plan.panels(), blocks, block);
      const Range tokens{panels.first * plan.width,
                         std::min(plan.layer.m, panels.last * plan.width)};
      pack_tokens(plan, call, tokens, x);
      gate_up(plan, call, panels.size(), x, hidden);
      down(plan, call, tokens, panels.size(), hidden);
    }
  }));
}

}  // namespace

constinit const Engine cpu_tiles_engine{.name = "cpu_tiles",
                                        .device_kind = DeviceKind::cpu,
                                        .can_implement = can_implement,
                                        .search = {space, default_config},
                                        .append = append,
                                        .sources = {"gemm/cpu/tiles.cpp"}};

}  // namespace fftune
