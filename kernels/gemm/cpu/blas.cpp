// Blocks of C over OpenBLAS: every thread multiplies blocks of its own with an sgemm of one thread,
// and finishes each while it is in the cache. Operands of bf16, and rows that a group gathers, are
// copied by slices of k.
//
// A chain runs as two GEMMs one after the other, or fused. A fused task takes a block of rows and a
// block of the intermediate's columns: it computes gate and up, their activation, and at once their
// share of y, so that the intermediate never leaves the cache.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/blas.hpp"
#include "kernels/gemm/cpu/host_gemm.hpp"
#include "kernels/gemm/cpu/work.hpp"
#include "kernels/gemm/engine.hpp"

namespace fftune {
namespace {

using namespace gemm_cpu;

constexpr std::int64_t most_slice = 512;  // of k, where operands are copied
constexpr std::int64_t most_worker_bytes = std::int64_t{256} << 20;

/// How a GEMM is divided: configured blocks, which are no larger than C.
struct Blocks {
  HostGemm host;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  int threads = 1;

  std::int64_t slice() const {
    return host.copies() ? std::min(most_slice, host.gemm.k) : host.gemm.k;
  }
  /// A worker's accumulators for each B operand, and copies of a slice of both operands.
  std::int64_t worker_floats() const {
    const std::int64_t copied = host.copies() ? (rows + columns) * slice() : 0;
    return host.gemm.b_operands() * rows * columns + copied;
  }
};

/// These rows and columns of one group and output of C; with grouped rows, rows in sorted order.
struct Block {
  std::int64_t group = 0;
  int output = 0;
  Range rows, columns;
};

/// Columns that a block does not divide: those of a head.
std::int64_t head_of(const GemmProblem& gemm) {
  return gemm.epilogue.kind == EpilogueKind::qkv ? gemm.epilogue.qkv.form.dim : 1;
}

Blocks blocks_of(const GemmProblem& gemm, const TensorPlaces& places, const DeviceFacts& facts,
                 const Config& config) {
  return {.host = HostGemm(gemm, places, facts),
          .rows = std::min(config.at("block_m"), gemm.m),
          .columns = std::max(std::min(config.at("block_n"), gemm.n), head_of(gemm)),
          .threads = config.get("threads")};
}

/// How many of these columns, one after the other, are in one weight: all, but where q, k and v
/// have weights of their own.
std::vector<std::int64_t> runs_of_columns(const GemmProblem& gemm, Range columns) {
  if (gemm.b.size() != 3) return {columns.size()};
  const QkvHeads& qkv = gemm.epilogue.qkv;
  std::vector<std::int64_t> runs;
  for (std::int64_t at = columns.first; at < columns.last; at += runs.back()) {
    const std::size_t part = qkv.part_of(at);
    runs.push_back(std::min(columns.last, qkv.first_column(part) + qkv.columns(part)) - at);
  }
  return runs;
}

void multiply(const Blocks& blocks, const HostCall& call, const SortedGroups& groups,
              const Block& block, float* worker) {
  const HostGemm& host = blocks.host;
  const GemmProblem& gemm = host.gemm;
  const bool by_k = gemm.groups.by == Grouping::reduction;
  const std::int64_t rows = block.rows.size(), columns = block.columns.size();
  const std::int64_t slice = blocks.slice(), operands = gemm.b_operands();
  float* const sums[] = {worker, worker + blocks.rows * blocks.columns};
  float* const a_room = worker + operands * blocks.rows * blocks.columns;
  float* const b_room = a_room + blocks.rows * slice;

  const Selection of_rows =
      by_k ? Selection{block.rows.first, rows} : groups.select(block.rows, gemm.a_sorted);
  const Range k = by_k ? groups.range(block.group) : Range{0, gemm.k};
  const Selection a_k = by_k ? groups.select(k, gemm.a_sorted) : Selection{0, gemm.k};
  const Selection b_k = by_k ? groups.select(k, gemm.b_sorted) : Selection{0, gemm.k};
  if (k.size() <= 0)  // a group without tokens
    for (std::int64_t i = 0; i < operands; ++i) std::fill_n(sums[i], rows * columns, 0.0f);
  float beta = 0;
  for (int pair = 0; pair < gemm.k_pairs(); ++pair)
    for (std::int64_t at = 0; at < k.size(); at += slice, beta = 1) {
      const std::int64_t depth = std::min(slice, k.size() - at);
      const auto a = host.a_view(call, pair + block.output, of_rows, a_k.part(at, depth), a_room);
      for (int i = 0; i < operands; ++i) {
        std::int64_t first = 0;
        for (const std::int64_t count : runs_of_columns(gemm, block.columns)) {
          const auto b =
              host.b_view(call, pair + i, block.group, {block.columns.first + first, count},
                          b_k.part(at, depth), b_room);
          sgemm(rows, count, depth, a, b, beta, sums[i] + first, columns);
          first += count;
        }
      }
    }
  const Selection c_rows =
      by_k ? Selection{block.rows.first, rows} : groups.select(block.rows, gemm.c_sorted);
  for (std::int64_t i = 0; i < rows; ++i)
    host.finish(call, block.group, block.output, c_rows[i], block.columns.first,
                sums[0] + i * columns, sums[1] + i * columns, columns);
}

void run(const Blocks& blocks, const HostCall& call, std::byte* order, float* workers) {
  const GemmProblem& gemm = blocks.host.gemm;
  const SortedGroups groups = blocks.host.sort(call, order);
  const bool by_k = gemm.groups.by == Grouping::reduction;
  const auto rows_of = [&](std::int64_t group) {
    return by_k ? Range{0, gemm.m} : groups.range(group);
  };
  const auto row_blocks = [&](std::int64_t group) {
    return ceil_div(rows_of(group).size(), blocks.rows);
  };
  const std::int64_t head = head_of(gemm),
                     across_n = ceil_div(gemm.n / head, blocks.columns / head);
  const std::int64_t across = across_n * gemm.outputs();
  std::int64_t tasks = 0;
  for (std::int64_t group = 0; group < groups.count; ++group) tasks += row_blocks(group) * across;
  deal(call.parallel, blocks.threads, tasks, [&](std::size_t worker, std::int64_t task) {
    std::int64_t group = 0;
    for (; task >= row_blocks(group) * across; ++group) task -= row_blocks(group) * across;
    const Range all = rows_of(group);
    const Range part = part_of(all.size(), row_blocks(group), task / across);
    const std::int64_t column_block = task % across / gemm.outputs();
    Range columns = part_of(gemm.n / head, across_n, column_block);
    columns = {columns.first * head, columns.last * head};
    const Block block{.group = group,
                      .output = static_cast<int>(task % gemm.outputs()),
                      .rows = {all.first + part.first, all.first + part.last},
                      .columns = columns};
    multiply(blocks, call, groups, block,
             workers + static_cast<std::int64_t>(worker) * blocks.worker_floats());
  });
}

/// A chain of two whose first has a gated epilogue, fused. Blocks of rows that are fewer than
/// threads share out the intermediate's columns, and their shares of y are added up in order at the
/// end.
struct Fused {
  Blocks gate_up;  // its columns are the intermediate's
  HostGemm down;

  std::int64_t row_blocks() const { return ceil_div(gate_up.host.gemm.m, gate_up.rows); }
  std::int64_t column_blocks() const { return ceil_div(gate_up.host.gemm.n, gate_up.columns); }
  std::int64_t splits() const {
    return std::min(ceil_div(gate_up.threads, row_blocks()), column_blocks());
  }
  bool sums_in_y() const {
    return splits() == 1 && down.gemm.c_dtype == DType::f32 && !down.gemm.epilogue.adds();
  }
  /// A worker's gate and up, and copies of whole rows of x and of weights.
  std::int64_t worker_floats() const {
    const std::int64_t deepest = std::max(gate_up.host.gemm.k, down.gemm.n);
    const std::int64_t copied =
        gate_up.host.copies() ? gate_up.rows * gate_up.host.gemm.k + gate_up.columns * deepest : 0;
    return 2 * gate_up.rows * gate_up.columns + copied;
  }
  std::int64_t partial_floats() const {
    return sums_in_y() ? 0 : splits() * down.gemm.m * down.gemm.n;
  }
};

/// act(gate) ⊙ up of a block in place of gate, rounded to the intermediate's type.
void activate(const HostGemm& host, const HostCall& call, Range rows, Range columns, float* gates,
              float* ups) {
  const std::int64_t width = columns.size(), count = rows.size() * width;
  for (std::int64_t i = 0; i < rows.size(); ++i)
    host.store_preactivations(call, rows.first + i, columns.first, gates + i * width,
                              ups + i * width, width);
  host.vector->gated(host.gemm.epilogue.activation, gates, ups, gates,
                     static_cast<std::size_t>(count));
  if (host.gemm.c_dtype == DType::f32) return;
  host.converter.store(host.gemm.c_dtype, gates, ups, count);
  host.converter.load(host.gemm.c_dtype, ups, gates, count);
}

void run(const Fused& fused, const HostCall& call, float* workers, float* partial_sums) {
  const HostGemm& gate_up = fused.gate_up.host;
  const std::int64_t m = gate_up.gemm.m, d = gate_up.gemm.k, h = gate_up.gemm.n;
  const std::int64_t n = fused.down.gemm.n, splits = fused.splits();
  float* const partial =
      fused.sums_in_y() ? reinterpret_cast<float*>(fused.down.c[0].at(call, 0, 0)) : partial_sums;
  const auto one_task = [&](std::size_t index, std::int64_t task) {
    const std::int64_t split = task % splits;
    const Range rows = part_of(m, fused.row_blocks(), task / splits);
    const Range own = part_of(fused.column_blocks(), splits, split);
    float* const gates = workers + static_cast<std::int64_t>(index) * fused.worker_floats();
    float* const ups = gates + fused.gate_up.rows * fused.gate_up.columns;
    float* const x_room = ups + fused.gate_up.rows * fused.gate_up.columns;
    float* const w_room = x_room + fused.gate_up.rows * d;
    const auto x = gate_up.a_view(call, 0, {rows.first, rows.size()}, {0, d}, x_room);
    float* const out = partial + (split * m + rows.first) * n;
    for (std::int64_t block = own.first; block < own.last; ++block) {
      const Range columns = part_of(h, fused.column_blocks(), block);
      const Selection of_columns{columns.first, columns.size()};
      for (const int operand : {0, 1})
        sgemm(rows.size(), columns.size(), d, x,
              gate_up.b_view(call, operand, 0, of_columns, {0, d}, w_room), 0,
              operand == 0 ? gates : ups, columns.size());
      activate(gate_up, call, rows, columns, gates, ups);
      sgemm(rows.size(), n, columns.size(), {gates, columns.size()},
            fused.down.b_view(call, 0, 0, {0, n}, of_columns, w_room),
            block == own.first ? 0.0f : 1.0f, out, n);
    }
  };
  deal(call.parallel, fused.gate_up.threads, fused.row_blocks() * splits, one_task);
  if (fused.sums_in_y()) return;
  deal(call.parallel, fused.gate_up.threads, m, [&](std::size_t, std::int64_t row) {
    float* const sum = partial + row * n;
    for (std::int64_t split = 1; split < splits; ++split)
      for (std::int64_t i = 0; i < n; ++i) sum[i] += sum[split * m * n + i];
    fused.down.finish(call, 0, 0, row, 0, sum, nullptr, n);
  });
}

/// Whether the chain can be fused.
bool can_fuse(const GemmChain& chain) {
  if (chain.size() != 2) return false;
  const GemmProblem& first = chain[0];
  const GemmProblem& second = chain[1];
  return !first.groups.any() && first.epilogue.kind == EpilogueKind::gated &&
         second.form == GemmForm::single && second.epilogue.kind == EpilogueKind::linear &&
         second.a_major == Major::k;
}

/// A worker's floats for the whole chain, without its tensors.
std::int64_t worker_floats(const GemmChain& chain, const Config& config) {
  const std::int64_t block_m = std::min(config.at("block_m"), chain[0].m);
  const auto copied = [](const GemmProblem& gemm) {
    return gemm.dtype != DType::f32 || gemm.groups.any();
  };
  std::int64_t most = 0;
  for (const GemmProblem& gemm : chain) {
    const std::int64_t rows = std::min(config.at("block_m"), gemm.m);
    const std::int64_t columns = std::min(config.at("block_n"), gemm.n);
    const std::int64_t room = copied(gemm) ? (rows + columns) * std::min(most_slice, gemm.k) : 0;
    most = std::max(most, gemm.b_operands() * rows * columns + room);
  }
  if (config.get("fused") != 1) return most;
  const std::int64_t columns = std::min(config.at("block_n"), chain[0].n);
  const std::int64_t room =
      copied(chain[0]) ? block_m * chain[0].k + columns * std::max(chain[0].k, chain[1].n) : 0;
  return 2 * block_m * columns + room;
}

std::optional<std::string> can_implement(const GemmChain& chain, const DeviceFacts& facts) {
  if (facts.toolkit.starts_with(no_blas)) return facts.toolkit;
  for (const GemmProblem& gemm : chain)
    if (gemm.quantisation.any() || gemm.dtype == DType::fp8 || gemm.c_dtype == DType::fp8)
      return "its products are in f32, and fp8 has scales to apply to them";
  return std::nullopt;
}

/// The smallest blocks are always allowed: there must be one that runs.
bool is_smallest(const Config& config) {
  return config.at("block_m") == 32 && config.at("block_n") == 64;
}

Space space(const GemmChain& chain, const DeviceFacts& facts) {
  const GemmProblem& gemm = chain.front();
  const bool is_gated_layer = gemm.form == GemmForm::dual_b && !gemm.groups.any();
  const auto fusions =
      can_fuse(chain) ? std::vector<std::int64_t>{0, 1} : std::vector<std::int64_t>{0};
  const auto columns = is_gated_layer ? std::vector<std::int64_t>{64, 128, 256, 512, 1024, 2048}
                                      : std::vector<std::int64_t>{64, 256, 1024};
  auto rows = up_to(gemm.m, {32, 128, 512});
  // A block has rows of one group: larger ones would be mostly empty.
  if (gemm.groups.by == Grouping::rows)
    std::erase_if(rows, [&](std::int64_t block) { return block != 32 && block >= 2 * gemm.m; });
  return Space()
      .parameter("block_m", "rows of a block", rows)
      .parameter("block_n", "columns of a block; fused: of the intermediate",
                 up_to(gemm.n, columns))
      .parameter("threads", "threads, each with products of its own", thread_counts(chain, facts))
      .parameter("fused", "1: y is added up from block to block of the intermediate", fusions)
      .when_absent(0)
      .constraint("the blocks of a thread must fit in 256 MiB", [chain](const Config& config) {
        return is_smallest(config) || worker_floats(chain, config) * 4 <= most_worker_bytes;
      });
}

Config default_config(const GemmChain& chain, const DeviceFacts& facts) {
  // Large blocks keep OpenBLAS's packing, and what is gathered, small beside the products; one
  // block for each thread at least.
  const GemmProblem& gemm = chain.front();
  const Space space = fftune::space(chain, facts);
  const std::int64_t matrices =
      gemm.outputs() * (gemm.groups.by == Grouping::reduction ? gemm.groups.count : 1);
  const std::int64_t threads = default_threads(chain, facts);
  Config config{{"block_m", 32}, {"block_n", 64}, {"threads", threads}, {"fused", 0}};
  for (const auto rows : space.parameters()[0].numbers())
    for (const auto columns : space.parameters()[1].numbers()) {
      Config larger = config;
      larger.set("block_m", rows);
      larger.set("block_n", columns);
      const auto blocks = ceil_div(gemm.m, rows) * ceil_div(gemm.n, columns) * matrices;
      if (blocks >= threads && space.violations(larger).empty()) config = larger;
    }
  return config;
}

void append(Program& program, const GemmChain& chain, const TensorPlaces& places,
            const DeviceFacts& facts, const Config& config) {
  const std::size_t first = program.scratch.size();
  if (config.get("fused") == 1) {
    const Fused fused{.gate_up = blocks_of(chain[0], places, facts, config),
                      .down = HostGemm(chain[1], places, facts)};
    program.scratch.push_back(
        {bytes_of_floats(fused.gate_up.threads * fused.worker_floats()), false});
    program.scratch.push_back({bytes_of_floats(fused.partial_floats()), false});
    program.steps.emplace_back(HostFunction([fused, first](const HostCall& call) {
      const BlasThreads one(1);
      run(fused, call, reinterpret_cast<float*>(call.scratch[first]),
          reinterpret_cast<float*>(call.scratch[first + 1]));
    }));
    return;
  }
  std::vector<Blocks> stages;
  std::size_t order_bytes = 0;
  std::int64_t floats = 0;
  for (const GemmProblem& gemm : chain) {
    stages.push_back(blocks_of(gemm, places, facts, config));
    order_bytes = std::max(order_bytes, stages.back().host.order_bytes());
    floats = std::max(floats, stages.back().threads * stages.back().worker_floats());
  }
  program.scratch.push_back({order_bytes, false});
  program.scratch.push_back({bytes_of_floats(floats), false});
  program.steps.emplace_back(HostFunction([stages, first](const HostCall& call) {
    const BlasThreads one(1);
    for (const Blocks& blocks : stages)
      run(blocks, call, call.scratch[first], reinterpret_cast<float*>(call.scratch[first + 1]));
  }));
}

}  // namespace

constinit const Engine cpu_blas_engine{.name = "cpu_blas",
                                       .device_kind = DeviceKind::cpu,
                                       .can_implement = can_implement,
                                       .search = {space, default_config},
                                       .append = append,
                                       .sources = {"gemm/cpu/blas.cpp"}};

}  // namespace fftune
