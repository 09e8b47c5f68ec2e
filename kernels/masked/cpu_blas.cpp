// Blocks over OpenBLAS: every thread multiplies blocks of one expert's tokens, which it gathers,
// by blocks of that expert's weights, with a product of one thread.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "cpu/blas.hpp"
#include "kernels/common/cpu_task.hpp"
#include "kernels/masked/cpu_work.hpp"
#include "kernels/masked/families.hpp"

namespace fftune::masked {
namespace {

constexpr std::int64_t most_lane_bytes = std::int64_t{256} << 20;

struct Blocks {
  StageProduct work;
  CpuTensors by;
  std::int64_t tokens = 0;    // of a block
  std::int64_t features = 0;  // output features of a block
  int threads = 1;

  /// Elements of f32 of one lane: the block's sums, its tokens, and weights widened from bf16.
  std::int64_t lane_floats() const {
    const std::int64_t widened = by.dtype == DType::f32 ? 0 : features;
    return 2 * tokens * features + (tokens + widened) * work.shape.k;
  }
};

Blocks blocks_of(Stage stage, const Problem& problem, const DeviceFacts& facts,
                 const Config& config) {
  Blocks blocks{product_of(stage, problem), CpuTensors(problem, facts)};
  blocks.tokens = std::min(config.at("block_m"), blocks.work.shape.m);
  blocks.features = std::min(config.at("block_n"), blocks.work.shape.n);
  blocks.threads = config.get("threads");
  return blocks;
}

/// `count` output features of weights from `feature` on: as they are in f32, else widened at
/// `wide`.
MatrixView weights_view(const Blocks& blocks, const void* tensor, std::int64_t feature,
                        std::int64_t count, float* wide) {
  const GemmShape& shape = blocks.work.shape;
  const std::int64_t stride = shape.b_transposed ? shape.n : shape.k;
  if (blocks.by.dtype == DType::f32)
    return {static_cast<const float*>(tensor) + (shape.b_transposed ? feature : feature * stride),
            stride, shape.b_transposed};
  if (!shape.b_transposed) {
    blocks.by.load(tensor, feature * stride, wide, count * stride);
    return {wide, stride};
  }
  for (std::int64_t k = 0; k < shape.k; ++k)
    blocks.by.load(tensor, k * stride + feature, wide + k * count, count);
  return {wide, count, true};
}

/// One block: rows [first, last) in the order of the mask, all of one expert, and the features
/// [feature, feature + count).
void run_block(const Blocks& blocks, const HostCall& call, const Grouping& groups, float* lane,
               std::int64_t first, std::int64_t last, std::int64_t feature, std::int64_t count) {
  const StageProduct& work = blocks.work;
  const std::int64_t n = work.shape.n, k = work.shape.k, rows = last - first;
  float* const sums[2] = {lane, lane + blocks.tokens * blocks.features};
  float* const tokens = lane + 2 * blocks.tokens * blocks.features;
  float* const wide = tokens + blocks.tokens * k;
  const auto& weights = work.b[first < groups.marked ? 0 : 1];
  for (std::size_t index = 0; index < weights.size(); ++index) {
    if (index < work.a.size())
      for (std::int64_t row = first; row < last; ++row)
        blocks.by.load(call.tensors[work.a[index]], (work.sorted_a ? row : groups.order[row]) * k,
                       tokens + (row - first) * k, k);
    const bool adds = work.shape.terms == 2 && index > 0;
    sgemm(rows, count, k, {tokens, k},
          weights_view(blocks, call.tensors[weights[index]], feature, count, wide), adds ? 1 : 0,
          sums[work.shape.products == 2 ? index : 0], count);
  }
  for (std::int64_t row = first; row < last; ++row)
    blocks.by.finish(work, call, (work.sorted_c ? row : groups.order[row]) * n + feature,
                     sums[0] + (row - first) * count, sums[1] + (row - first) * count, count);
}

/// scratch: the order of the tokens, then lanes.
void run_stage(const Blocks& blocks, const HostCall& call) {
  const StageProduct& work = blocks.work;
  const Grouping groups = group(static_cast<const std::uint8_t*>(call.tensors[work.mask]),
                                work.shape.m, reinterpret_cast<std::int64_t*>(call.scratch[0]));
  const std::int64_t marked_blocks = ceil_div(groups.marked, blocks.tokens);
  const std::int64_t token_blocks =
      marked_blocks + ceil_div(work.shape.m - groups.marked, blocks.tokens);
  const std::int64_t feature_blocks = ceil_div(work.shape.n, blocks.features);
  call.parallel.run(blocks.threads, blocks.threads, [&](int thread) {
    float* const lane =
        reinterpret_cast<float*>(call.scratch[1]) + std::int64_t{thread} * blocks.lane_floats();
    for (std::int64_t task = thread; task < token_blocks * feature_blocks; task += blocks.threads) {
      const std::int64_t block = task / feature_blocks;
      const bool marked = block < marked_blocks;
      const std::int64_t first =
          marked ? block * blocks.tokens : groups.marked + (block - marked_blocks) * blocks.tokens;
      const std::int64_t end = marked ? groups.marked : work.shape.m;
      const std::int64_t feature = task % feature_blocks * blocks.features;
      run_block(blocks, call, groups, lane, first, std::min(end, first + blocks.tokens), feature,
                std::min(blocks.features, work.shape.n - feature));
    }
  });
}

class CpuBlas final : public Family {
 public:
  /// `name` is a string literal.
  CpuBlas(std::string_view name, std::vector<Stage> stages)
      : name_(name), stages_(std::move(stages)) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override {
    return "blocks over OpenBLAS, each of one expert's tokens gathered";
  }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  std::vector<std::string> stages() const override {
    std::vector<std::string> names;
    for (const Stage stage : stages_) names.push_back(stage_name(stage));
    return names;
  }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    return refuse_host(stages_, problem);
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return Space()
        .parameter("block_m", "tokens of a block", {32, 128, 512})
        .parameter("block_n", "output features of a block", {64, 256, 1024})
        .parameter("threads", "threads, each with products of its own", thread_counts(facts))
        .constraint("a block of tokens that is mostly empty",
                    [m = problem.size("m")](const Config& config) {
                      return config.at("block_m") == 32 || config.at("block_m") < 2 * m;
                    },
                    {"block_m"})
        .constraint("the blocks of a thread take more than 256 MiB", [this, problem,
                                                                      facts](const Config& config) {
          const bool smallest = config.at("block_m") == 32 && config.at("block_n") == 64;
          return smallest || lane_floats(problem, facts, config) * 4 <= most_lane_bytes;
        });
  }

  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    // Large blocks keep OpenBLAS's packing and the gathering small beside the products, as long as
    // every thread has some.
    const Space space = this->space(problem, facts);
    const GemmShape shape = product_of(stages_.front(), problem).shape;
    Config config{{"block_m", 32}, {"block_n", 64}, {"threads", facts.multiprocessors}};
    for (const std::int64_t tokens : {32, 128, 512})
      for (const std::int64_t features : {64, 256, 1024}) {
        Config larger = config;
        larger.set("block_m", tokens);
        larger.set("block_n", features);
        const auto blocks = ceil_div(shape.m, tokens) * ceil_div(shape.n, features);
        if (blocks >= facts.multiprocessors && space.violations(larger).empty()) config = larger;
      }
    return config;
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    Program program;
    std::vector<Blocks> blocks;
    for (const Stage stage : stages_) {
      blocks.push_back(blocks_of(stage, problem, facts, config));
      program.host_tensors = std::max(program.host_tensors, host_tensors(stage, problem));
    }
    const auto lanes =
        static_cast<std::size_t>(config.at("threads") * lane_floats(problem, facts, config));
    program.scratch = {order_scratch(problem.size("m")), {lanes * sizeof(float), false}};
    program.steps.emplace_back(HostFunction([blocks](const HostCall& call) {
      const BlasThreads alone(1);
      for (const Blocks& stage : blocks) run_stage(stage, call);
    }));
    return program;
  }

  std::vector<std::string> sources() const override {
    return {"masked/cpu_blas.cpp", "masked/cpu_work.cpp", curve_source,
            row_kernel_sources[0], row_kernel_sources[1], vector_kernel_source};
  }

 private:
  /// Of the stage that takes most.
  std::int64_t lane_floats(const Problem& problem, const DeviceFacts& facts,
                           const Config& config) const {
    std::int64_t most = 0;
    for (const Stage stage : stages_)
      most = std::max(most, blocks_of(stage, problem, facts, config).lane_floats());
    return most;
  }

  std::string_view name_;
  std::vector<Stage> stages_;
};

}  // namespace

std::vector<const Family*> linear_cpu_blas_families() {
  static const CpuBlas forward("cpu_blas", {Stage::linear}), dx("cpu_dx_blas", {Stage::dx});
  return {&forward, &dx};
}
std::vector<const Family*> ffn_cpu_blas_families() {
  static const CpuBlas forward("cpu_blas", {Stage::gate_up, Stage::down}),
      gate_up("cpu_gate_up_blas", {Stage::gate_up}),
      d_hidden("cpu_d_hidden_blas", {Stage::d_hidden}), d_x("cpu_d_x_blas", {Stage::d_x});
  return {&forward, &gate_up, &d_hidden, &d_x};
}

}  // namespace fftune::masked
