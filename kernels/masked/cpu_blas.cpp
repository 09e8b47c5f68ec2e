// Blocks over OpenBLAS: every thread multiplies blocks of one expert's tokens, which it gathers,
// by blocks of that expert's weights, with a product of one thread.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/blas.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/cpu_task.hpp"
#include "kernels/common/cpu_vector.hpp"
#include "kernels/masked/cpu_work.hpp"
#include "kernels/masked/families.hpp"

namespace fftune::masked {
namespace {

constexpr std::int64_t most_lane_bytes = std::int64_t{256} << 20;

struct Blocks {
  StageProduct work;
  DType dtype = DType::f32;
  Activation activation = Activation::none;
  std::int64_t tokens = 0;    // of a block
  std::int64_t features = 0;  // output features of a block
  int threads = 1;
  const VectorKernels* vector = nullptr;

  /// Elements of f32 of one lane: the block's sums, its tokens, and weights widened from bf16.
  std::int64_t lane_floats() const {
    const std::int64_t widened = dtype == DType::f32 ? 0 : features;
    return 2 * tokens * features + (tokens + widened) * work.shape.k;
  }
};

Blocks blocks_of(Stage stage, const Problem& problem, const DeviceFacts& facts,
                 const Config& config) {
  Blocks blocks;
  blocks.work = product_of(stage, problem);
  blocks.dtype = problem.dtype;
  if (stage == Stage::gate_up) blocks.activation = parse_activation(problem.option("act"));
  blocks.tokens = std::min(config.at("token_block"), blocks.work.shape.m);
  blocks.features = std::min(config.at("feature_block"), blocks.work.shape.n);
  blocks.threads = config.get("threads");
  blocks.vector = &vector_kernels(facts.arch);
  return blocks;
}

/// Row `row` of a tensor with rows of `columns`, as f32 at `to`.
void load_row(const Blocks& blocks, const void* tensor, std::int64_t row, std::int64_t columns,
              float* to) {
  if (blocks.dtype == DType::f32)
    std::copy_n(static_cast<const float*>(tensor) + row * columns, columns, to);
  else
    blocks.vector->widen(static_cast<const std::uint16_t*>(tensor) + row * columns, to,
                         static_cast<std::size_t>(columns));
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
  for (std::int64_t row = first; row < last; ++row)
    load_row(blocks, call.tensors[work.a], work.sorted_a ? row : groups.order[row], k,
             tokens + (row - first) * k);
  const auto& weights = work.b[first < groups.marked ? 0 : 1];
  for (std::size_t index = 0; index < weights.size(); ++index) {
    const void* const tensor = call.tensors[weights[index]];
    MatrixView view{wide, k};
    if (blocks.dtype == DType::f32)
      view.data = static_cast<const float*>(tensor) + feature * k;
    else
      for (std::int64_t i = 0; i < count; ++i)
        load_row(blocks, tensor, feature + i, k, wide + i * k);
    sgemm(rows, count, k, {tokens, k}, view, 0, sums[index], count);
  }
  if (weights.size() == 2)
    blocks.vector->gated(blocks.activation, sums[0], sums[1], sums[0],
                         static_cast<std::size_t>(rows * count));
  for (std::int64_t row = first; row < last; ++row) {
    const std::int64_t at = (work.sorted_c ? row : groups.order[row]) * n + feature;
    const float* const from = sums[0] + (row - first) * count;
    if (blocks.dtype == DType::f32)
      std::copy_n(from, count, static_cast<float*>(call.tensors[work.c]) + at);
    else
      blocks.vector->narrow(from, static_cast<std::uint16_t*>(call.tensors[work.c]) + at,
                            static_cast<std::size_t>(count));
  }
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
  explicit CpuBlas(std::vector<Stage> stages) : stages_(std::move(stages)) {}

  std::string_view name() const override { return "cpu_blas"; }
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
    return refuse_pass(stages_.front(), problem);
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return Space()
        .parameter("token_block", "tokens of a block", {32, 128, 512})
        .parameter("feature_block", "output features of a block", {64, 256, 1024})
        .parameter("threads", "threads, each with products of its own", thread_counts(facts))
        .constraint("a block of tokens that is mostly empty",
                    [m = problem.size("m")](const Config& config) {
                      return config.at("token_block") == 32 || config.at("token_block") < 2 * m;
                    },
                    {"token_block"})
        .constraint("the blocks of a thread take more than 256 MiB", [this, problem,
                                                                      facts](const Config& config) {
          const bool smallest = config.at("token_block") == 32 && config.at("feature_block") == 64;
          return smallest || lane_floats(problem, facts, config) * 4 <= most_lane_bytes;
        });
  }

  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    // Large blocks keep OpenBLAS's packing and the gathering small beside the products, as long as
    // every thread has some.
    const Space space = this->space(problem, facts);
    const GemmShape shape = product_of(stages_.front(), problem).shape;
    Config config{{"token_block", 32}, {"feature_block", 64}, {"threads", facts.multiprocessors}};
    for (const std::int64_t tokens : {32, 128, 512})
      for (const std::int64_t features : {64, 256, 1024}) {
        Config larger = config;
        larger.set("token_block", tokens);
        larger.set("feature_block", features);
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
      program.host_tensors = std::max(program.host_tensors, blocks.back().work.c + 1);
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
    return {"masked/cpu_blas.cpp", "masked/cpu_work.hpp", vector_kernel_source};
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

  std::vector<Stage> stages_;
};

}  // namespace

const Family& linear_cpu_blas_family() {
  static const CpuBlas family({Stage::linear});
  return family;
}
const Family& ffn_cpu_blas_family() {
  static const CpuBlas family({Stage::gate_up, Stage::down});
  return family;
}

}  // namespace fftune::masked
