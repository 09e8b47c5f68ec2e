// Sums over each expert's tokens on the CPU, by blocks over OpenBLAS: every thread has blocks of
// the gradients of its own, and adds up its expert's tokens, which it gathers, a slice at a time.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cpu/blas.hpp"
#include "kernels/common/cpu_task.hpp"
#include "kernels/masked/cpu_work.hpp"
#include "kernels/masked/families.hpp"

namespace fftune::masked {
namespace {

constexpr std::int64_t slice = 256;  // tokens

struct Blocks {
  StageSum work;
  CpuTensors by;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  int threads = 1;

  std::int64_t lane_floats() const { return rows * columns + (rows + columns) * slice; }
};

/// Of both experts and every result, a block of `rows` x `columns` of c.
struct Block {
  std::size_t expert, result;
  std::int64_t row, rows, column, columns;
};

void run_block(const Blocks& blocks, const HostCall& call, const Grouping& groups,
               const Block& block, float* lane) {
  const StageSum& work = blocks.work;
  float* const a = lane + blocks.rows * blocks.columns;
  float* const b = a + blocks.rows * slice;
  const std::int64_t first = block.expert == 0 ? 0 : groups.marked;
  const std::int64_t end = block.expert == 0 ? groups.marked : work.shape.k;
  if (first == end) std::fill_n(lane, block.rows * block.columns, 0.0f);
  for (std::int64_t place = first; place < end; place += slice) {
    const std::int64_t count = std::min(slice, end - place);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t token = groups.order[place + i];
      blocks.by.load(call.tensors[work.a[block.result]],
                     (work.sorted_a ? place + i : token) * work.shape.m + block.row,
                     a + i * block.rows, block.rows);
      blocks.by.load(call.tensors[work.b],
                     (work.sorted_b ? place + i : token) * work.shape.n + block.column,
                     b + i * block.columns, block.columns);
    }
    sgemm(block.rows, block.columns, count, {a, block.rows, true}, {b, block.columns, true},
          place == first ? 0 : 1, lane, block.columns);
  }
  for (std::int64_t row = 0; row < block.rows; ++row)
    blocks.by.finish(work, call, block.expert, block.result,
                     (block.row + row) * work.shape.n + block.column, lane + row * block.columns,
                     block.columns);
}

/// scratch: the order of the tokens, then lanes.
void run(const Blocks& blocks, const HostCall& call) {
  const GemmShape& shape = blocks.work.shape;
  const Grouping groups = group(static_cast<const std::uint8_t*>(call.tensors[blocks.work.mask]),
                                shape.k, reinterpret_cast<std::int64_t*>(call.scratch[0]));
  const std::int64_t across = ceil_div(shape.n, blocks.columns);
  const std::int64_t own = ceil_div(shape.m, blocks.rows) * across;  // blocks of a result
  const auto results = static_cast<std::int64_t>(blocks.work.a.size());
  const BlasThreads alone(1);
  std::atomic<std::int64_t> next{0};
  call.parallel.run(blocks.threads, blocks.threads, [&](int thread) {
    float* const lane =
        reinterpret_cast<float*>(call.scratch[1]) + std::int64_t{thread} * blocks.lane_floats();
    for (std::int64_t task = next++; task < 2 * results * own; task = next++) {
      const std::int64_t place = task % own;
      Block block{static_cast<std::size_t>(task / own / results),
                  static_cast<std::size_t>(task / own % results),
                  place / across * blocks.rows,
                  blocks.rows,
                  place % across * blocks.columns,
                  blocks.columns};
      block.rows = std::min(block.rows, shape.m - block.row);
      block.columns = std::min(block.columns, shape.n - block.column);
      run_block(blocks, call, groups, block, lane);
    }
  });
}

class CpuBlasSum final : public Family {
 public:
  /// `name` is a string literal.
  CpuBlasSum(std::string_view name, Stage stage) : name_(name), stage_(stage) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override {
    return "blocks over OpenBLAS, each summing over one expert's tokens";
  }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  std::vector<std::string> stages() const override { return {stage_name(stage_)}; }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    return refuse_host({stage_}, problem);
  }

  Space space(const Problem&, const DeviceFacts& facts) const override {
    return Space()
        .parameter("block_m", "rows of a block", {32, 128, 512})
        .parameter("block_n", "columns of a block", {64, 256, 1024})
        .parameter("threads", "threads, each with products of its own", thread_counts(facts));
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    // The largest blocks that leave one for each thread: each gathers the tokens that it adds up.
    const GemmShape shape = sum_of(stage_, problem).shape;
    Config config{{"block_m", 32}, {"block_n", 64}, {"threads", facts.multiprocessors}};
    for (const std::int64_t rows : {32, 128, 512})
      for (const std::int64_t columns : {64, 256, 1024})
        if (ceil_div(shape.m, rows) * ceil_div(shape.n, columns) * shape.results >=
            facts.multiprocessors) {
          config.set("block_m", rows);
          config.set("block_n", columns);
        }
    return config;
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    Blocks blocks{sum_of(stage_, problem), CpuTensors(problem, facts)};
    blocks.rows = config.at("block_m");
    blocks.columns = config.at("block_n");
    blocks.threads = config.get("threads");
    Program program;
    program.host_tensors = host_tensors(stage_, problem);
    program.scratch = {
        order_scratch(problem.size("m")),
        {static_cast<std::size_t>(blocks.threads * blocks.lane_floats()) * sizeof(float), false}};
    program.steps.emplace_back(HostFunction([blocks](const HostCall& call) { run(blocks, call); }));
    return program;
  }

  std::vector<std::string> sources() const override {
    return {"masked/cpu_blas_sum.cpp", "masked/cpu_work.cpp", curve_source,
            row_kernel_sources[0],     row_kernel_sources[1], vector_kernel_source};
  }

 private:
  std::string_view name_;
  Stage stage_;
};

}  // namespace

std::vector<const Family*> linear_cpu_blas_sum_families() {
  static const CpuBlasSum dw("cpu_dw_blas", Stage::dw);
  return {&dw};
}
std::vector<const Family*> ffn_cpu_blas_sum_families() {
  static const CpuBlasSum d_gate_up("cpu_d_gate_up_blas", Stage::d_gate_up),
      d_down("cpu_d_down_blas", Stage::d_down);
  return {&d_gate_up, &d_down};
}

}  // namespace fftune::masked
