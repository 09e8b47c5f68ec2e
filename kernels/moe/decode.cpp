// The families for few tokens: route and gate_up in one launch, down and combine in another.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "kernels/common/activation.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/least_cost.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/decode/decode.hpp"
#include "kernels/gemm/engine.hpp"
#include "kernels/moe/decode_config.cuh"
#include "kernels/moe/moe.hpp"

namespace fftune::moe {
namespace {

constexpr const char* decode_file = "moe/decode.cu";
constexpr std::int64_t most_static_bytes = 48896;  // of shared memory

/// How many experts the tokens can choose, and about how many they do.
std::int64_t most_chosen(const Shape& shape) {
  return std::min(shape.all_experts(), shape.rows());
}
double usually_chosen(const Problem& problem) {
  double chosen = 0;
  for (const ExpertsAlike& alike : expected_rows(problem))
    chosen += alike.experts * (1 - std::exp(-alike.tokens));
  return std::max(chosen, 1.0);
}

/// Whether gate_up finds the scales of hidden.
bool finds_scales(const Problem& problem) {
  return scales_of(problem) == Scales::token || scales_of(problem) == Scales::block;
}

struct Block : chosen_config {
  std::int64_t k_step;  // elements of a row that four threads load at once

  /// The part that all configurations of a problem share.
  explicit Block(const Problem& problem)
      : chosen_config{.tokens = stream_tokens(problem.size("m")),
                      .packed = static_cast<weights_of_both>(packing_of(problem)),
                      .scaled = static_cast<chosen_scales>(scales_of(problem))},
        k_step(64 / static_cast<std::int64_t>(dtype_bytes(problem.dtype))) {}
  Block(const Problem& problem, const Config& config) : Block(problem) {
    ConfigReader reader(config);
    rows = reader.get("rows");
    warps = reader.get("warps");
    unroll = reader.get("unroll");
    k_parts = reader.get_or("k_parts", 1);
    l2_prefetch = reader.get_or("l2_prefetch", 0);
  }

  std::string template_argument() const {
    constexpr const char* packings[] = {"separate", "halves", "interleaved"};
    constexpr const char* scales[] = {"none", "tensor", "token", "block"};
    return StructText("chosen_config", "tokens", tokens, "rows", rows, "warps", warps, "unroll",
                      unroll, "k_parts", k_parts, "l2_prefetch", l2_prefetch)
        .name("packed", "weights_of_both", packed, weights_of_both::separate, packings)
        .name("scaled", "chosen_scales", scaled, chosen_scales::none, scales);
  }
  bool is_fp8() const { return k_step == 64; }
  /// As compiled by ptxas. In fp8, the fp16 expansion and partial sums come on top, and with two
  /// operands the compiler delays some loads.
  int registers(int operands) const {
    if (is_fp8() && operands == 2)
      return std::min(128, 46 + rows * (1 + unroll)) + 8 * (tokens / 8 - 1);
    const int of_fp8 = is_fp8() ? 24 + rows / 2 : 0;
    return shape(operands).registers() + 48 + of_fp8;
  }
};

/// A family of the decode kernels: `operands` are the weights that a block multiplies with, [n, k]
/// of each expert.
class Decode : public Family {
 public:
  DeviceKind device_kind() const final { return DeviceKind::cuda; }
  std::vector<std::string> sources() const final { return {decode_file}; }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto reason = refuse_cuda(problem, "fwd", facts)) return reason;
    if (is_batch_invariant(problem)) return std::string(order_depends_on_rows);
    if (packed_format(problem).packed) return "it reads dense weights";
    if (quantises(problem)) return "a stage between those that it covers quantises the tokens";
    const Shape shape = shape_of(problem);
    const bool is_fp8 = problem.dtype == DType::fp8;
    if (problem.dtype != DType::bf16 && problem.dtype != DType::fp16 && !is_fp8)
      return fmt::format("mma.sync m16n8k16 multiplies bf16, fp16 and fp8 as fp16, not {}",
                         dtype_name(problem.dtype));
    if (is_fp8 && facts.compute_capability < 90)
      return "fp8 needs compute capability 9.0: the blocks that find a scale of hidden are a "
             "cluster";
    if (shape.rows() > chosen_config::most_choices)
      return fmt::format("every block reads all ids, up to {}: m * top-k is {}",
                         chosen_config::most_choices, shape.rows());
    const double rows = static_cast<double>(shape.rows()) / usually_chosen(problem);
    if (rows > 12)
      return fmt::format(
          "an expert's weights are read again for every 16 of its rows, and {:.0f} are expected",
          rows);
    // Measured on an H200: these kernels reach 58 to 82% of the memory's rate, and tiles of wgmma
    // 91 to 98% where they fill the SMs.
    const double tiles = usually_chosen(problem) * static_cast<double>(quotient_up(shape.h, 64));
    constexpr double most_tiles = 1.45;
    if (facts.compute_capability == 90 && tiles > most_tiles * facts.multiprocessors)
      return fmt::format(
          "the chosen experts have {:.0f} tiles of weights: more than {} for each SM are read "
          "faster by TMA",
          tiles, most_tiles);
    const std::int64_t vector = 16 / static_cast<std::int64_t>(dtype_bytes(problem.dtype));
    for (const std::int64_t features : {shape.d, shape.h})
      if (features % vector != 0)
        return fmt::format("rows of {} elements are not 16-byte aligned: use multiples of {}",
                           features, vector);
    return std::nullopt;
  }
  bool is_preferred(const Problem& problem, const DeviceFacts& facts) const final {
    // The refusal has what was measured where there is wgmma.
    if (facts.compute_capability != 90) return !are_tiles_faster(problem, facts);
    // Expanding fp8 takes as long as reading it, which wgmma does without: with one token of
    // DeepSeek-V3 on eight GPUs an H100 takes 28.7 us so, and 25.8 with TMA and wgmma.
    if (problem.dtype != DType::fp8) return true;
    for (const char* stage : {ffn::stage_gate_up, ffn::stage_down})
      if (sm90_engine.can_implement({gemm_stage(problem, stage)->gemm(problem)}, facts))
        return true;
    return false;
  }
  Space space(const Problem& problem, const DeviceFacts& facts) const final {
    return blocks(problem, facts).space();
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const final {
    const Weights weights = this->weights(problem);
    return least_cost(blocks(problem, facts), name(),
                      [&](const Block& block) { return seconds(weights, facts, block); });
  }
  std::optional<double> estimate(const Problem& problem, const DeviceFacts& facts,
                                 const Config& config) const final {
    return seconds(weights(problem), facts, Block(problem, config));
  }

 private:
  /// Whether the cost models expect so of the families that have a launch for each stage. Those of
  /// tiles of mma.sync are not fitted to experts, so a few percent do not count.
  bool are_tiles_faster(const Problem& problem, const DeviceFacts& facts) const {
    constexpr double least_ratio = 1.05;
    double of_tiles = 0;
    for (const std::string& stage : stages()) {
      const auto seconds = seconds_of_stage(stage, problem, facts);
      if (!seconds) return false;
      of_tiles += *seconds;
    }
    return estimate(problem, facts, default_config(problem, facts)) > least_ratio * of_tiles;
  }
  /// The estimate of the family that serves this stage alone, if there is one.
  static std::optional<double> seconds_of_stage(const std::string& stage, const Problem& problem,
                                                const DeviceFacts& facts) {
    for (const Family* family : moe_ffn_op().families())
      if (family->device_kind() == DeviceKind::cuda && !family->is_fallback() &&
          family->stages() == std::vector{stage} && !family->refusal(problem, facts) &&
          family->is_preferred(problem, facts))
        return family->estimate(problem, facts, family->default_config(problem, facts));
    return std::nullopt;
  }

 protected:
  using Blocks = TypedSpace<Block>;
  virtual Blocks blocks(const Problem& problem, const DeviceFacts& facts) const = 0;

  static void limit_registers(Blocks& space, int operands) {
    limit_stream(space, {"rows", "warps", "unroll"}, [operands](const Block& block) {
      return StreamNeeds{.loads = block.shape(operands).loads(),
                         .registers = block.registers(operands),
                         .threads = block.threads()};
    });
  }

  /// Bytes that are read: `rows` rows of `k` elements of each of `operands` weights.
  struct Weights {
    int operands;
    double rows;
    std::int64_t k;
    std::int64_t hidden;    // features of an expert
    bool clusters = false;  // blocks of the columns that share a scale
  };
  virtual Weights weights(const Problem& problem) const = 0;
  /// How much longer it takes than the bytes in flight explain, with this many blocks an SM.
  virtual double longer(const Block&, double blocks_of_sm) const = 0;

  /// The time of reading them with the bytes that a configuration has in flight, by blocks that may
  /// fill the device unevenly.
  double seconds(const Weights& weights, const DeviceFacts& facts, const Block& block) const {
    constexpr double wanted_bytes = 40 * 1024;  // of each SM: what memory delivers in its latency
    constexpr double start_seconds = 3e-6;
    const double processors = std::max(facts.multiprocessors, 1);
    const double bandwidth = facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12;
    const double threads = static_cast<double>(block.threads());
    const double registers = threads * static_cast<double>(block.registers(weights.operands));
    const double blocks = std::max(weights.rows / static_cast<double>(block.rows), 1.0);
    const double at_once = std::max(std::floor(std::min(2048 / threads, 65536 / registers)), 1.0);
    const double resident = std::min(at_once, std::ceil(blocks / processors));
    // Expanding fp8 takes about as long as reading it where a scheduler has a single warp.
    const bool few_warps = block.is_fp8() && resident * static_cast<double>(block.warps) < 8;
    // A warp that has no k has nothing in flight.
    const double busy =
        std::min(1.0, static_cast<double>(weights.k) /
                          static_cast<double>(block.k_step * block.unroll * block.warps));
    const double in_flight =
        resident * busy * threads * 16 * static_cast<double>(block.shape(weights.operands).loads());
    const double waves = std::ceil(blocks / processors) * processors / blocks;
    // Clusters do not fill every GPC, and one that does not fit waits for all of the others.
    const auto of_cluster = weights.clusters ? scale_block / block.rows : 1.0;
    const double slots =
        std::max(std::floor(0.91 * at_once * processors / of_cluster), 1.0) * of_cluster;
    const double with_order = blocks + static_cast<double>(quotient_up(weights.hidden, block.rows));
    const bool waits = of_cluster > 1 && with_order > slots;
    const double rounds = waits ? std::ceil(with_order / slots) * slots / with_order : 1;
    const double bytes = (block.is_fp8() ? 1.0 : 2.0) * static_cast<double>(weights.operands) *
                         weights.rows * static_cast<double>(weights.k);
    // Blocks of this launch begin to read their weights before they could have asked for them in
    // L2.
    return start_seconds + (block.l2_prefetch != 0 ? 1.1 : 1) * bytes / (0.9 * bandwidth) *
                               std::max(1.0, wanted_bytes / in_flight) * rounds *
                               longer(block, std::ceil(blocks / processors)) *
                               (few_warps ? 1.15 : 1) * (0.5 + 0.5 * waves);
  }

  /// A launch's arguments in their order.
  struct Arguments {
    explicit Arguments(const Problem& problem) : places(moe_ffn_op().tensors(problem)) {}

    void add(std::initializer_list<const char*> names) {
      for (const char* name : names) list.emplace_back(tensor_of(places, name));
    }
    /// Null where they are not `there`.
    void add_if(bool there, std::initializer_list<const char*> names) {
      for (const char* name : names)
        list.push_back(tensor_or_null(there ? places.at(name) : absent));
    }
    void add_sizes(const Shape& shape) {
      for (const std::int64_t size :
           {shape.rows(), shape.top_k, shape.shared, shape.experts, shape.d, shape.h})
        list.emplace_back(static_cast<std::int32_t>(size));
    }

    TensorPlaces places;
    std::vector<Argument> list;
  };
};

class ChosenGateUp final : public Decode {
 public:
  std::string_view name() const override { return "gate_up_decode"; }
  std::string_view summary() const override {
    return "few tokens: each chosen expert's gate and up read once, sorted in the same launch";
  }
  std::vector<std::string> stages() const override { return {stage_route, ffn::stage_gate_up}; }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto reason = Decode::refusal(problem, facts)) return reason;
    if (stores_gates(problem)) return "it keeps gate and up in registers";
    return std::nullopt;
  }
  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Shape shape = shape_of(problem);
    const Block block(problem, config);
    const bool separate = packing_of(problem) == Packing::separate;
    // Whole clusters, of the columns that share a scale of hidden.
    const std::int64_t columns = finds_scales(problem) ? scale_block : block.rows;
    Arguments arguments(problem);
    arguments.add({"x", own_ids_of(problem), separate ? "w_gate" : "w_gate_up",
                   separate ? "w_up" : "w_gate_up", "offsets", "tokens", "places", "hidden"});
    arguments.add_if(weighs_before(problem), {"weights", "row_weights"});
    arguments.add_if(has_bias(problem),
                     {separate ? "b_gate" : "b_gate_up", separate ? "b_up" : "b_gate_up"});
    arguments.add_if(scales_of(problem) != Scales::none,
                     {"x_scale", separate ? "w_gate_scale" : "w_gate_up_scale",
                      separate ? "w_up_scale" : "w_gate_up_scale", "hidden_scale"});
    arguments.add_sizes(shape);
    Program program;
    KernelLaunch& launch = append_pdl_kernel(
        program, facts, decode_file,
        fmt::format("chosen_gate_up<{}, {}, {}>", element_type(problem.dtype),
                    activation_type(parse_activation(problem.option("act"))),
                    block.template_argument()),
        {static_cast<std::uint32_t>(quotient_up(shape.h, columns) * columns / block.rows),
         static_cast<std::uint32_t>(most_chosen(shape) + 1)},
        static_cast<std::uint32_t>(block.threads()), std::move(arguments.list));
    if (finds_scales(problem)) launch.cluster.x = static_cast<std::uint32_t>(columns / block.rows);
    return program;
  }

 private:
  Blocks blocks(const Problem& problem, const DeviceFacts&) const override {
    Blocks space{Block(problem)};
    space
        .parameter("rows", "rows of gate, and of up, of a block", Blocks::to<&Block::rows>,
                   {8, 16, 32})
        .parameter("warps", "warps of a block, which share k", Blocks::to<&Block::warps>,
                   {4, 8, 16})
        .parameter("unroll", "16-byte loads of a row that a thread issues at once",
                   Blocks::to<&Block::unroll>, {1, 2, 4});
    space.constraint("the warps' accumulators must fit in 48 KB of shared memory",
                     {"rows", "warps"}, [](const Block& block) {
                       return block.shape(2).reduction_bytes(block.warps) +
                                  block.warps * block.tokens * 4 + block.tokens * block.rows / 2 +
                                  4096 + 128 <=
                              most_static_bytes;
                     });
    space.constraint(
        "the blocks with the 128 columns of one scale of hidden are a cluster of at most 8: rows "
        "is 16 or more",
        {"rows"},
        [finds = finds_scales(problem)](const Block& block) { return !finds || block.rows >= 16; });
    limit_registers(space, 2);
    return space;
  }
  // Measured on an H200. ptxas does not keep many loads in flight, and many rows ask for more
  // lines; of few rows each block reads ids and tokens for less.
  double longer(const Block& block, double blocks_of_sm) const override {
    const double few_rows = 1 + 0.8 / static_cast<double>(block.rows);
    const bool many_rows = block.rows == 32;
    if (block.is_fp8())
      return few_rows * (block.unroll == 4 || (block.tokens == 16 && many_rows) ? 1.1 : 1);
    // One load of a row at a time: with 128 experts of 768 features 3 to 10% faster, 12% slower
    // with 64 of 1,024 and of 1,408.
    const bool one_load = block.unroll == 1 && block.warps >= 8;
    const double loads = one_load ? (blocks_of_sm <= 3 ? 0.97 : 1.04) : 1;
    return few_rows * (block.unroll == 4 ? 1.35 : many_rows ? 1.3 : loads);
  }
  Weights weights(const Problem& problem) const override {
    const Shape shape = shape_of(problem);
    return {.operands = 2,
            .rows = usually_chosen(problem) * static_cast<double>(shape.h),
            .k = shape.d,
            .hidden = shape.h,
            .clusters = finds_scales(problem)};
  }
};

class ChosenDown final : public Decode {
 public:
  std::string_view name() const override { return "down_decode"; }
  std::string_view summary() const override {
    return "few tokens: each chosen expert's down read once, and the weighted sum in the same "
           "launch";
  }
  std::vector<std::string> stages() const override { return {ffn::stage_down, stage_combine}; }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Shape shape = shape_of(problem);
    const Block block(problem, config);
    Arguments arguments(problem);
    arguments.add({"hidden", own_ids_of(problem)});
    arguments.add_if(!weighs_before(problem), {"weights"});
    arguments.add({"w_down"});
    arguments.add_if(has_bias(problem), {"b_down"});
    arguments.add_if(has_residual(problem), {"residual"});
    arguments.add({"y"});
    arguments.add_if(scales_of(problem) != Scales::none, {"hidden_scale", "w_down_scale"});
    arguments.list.emplace_back(static_cast<std::int32_t>(shape.m));
    arguments.add_sizes(shape);
    Program program;
    KernelLaunch& launch = append_pdl_kernel(
        program, facts, decode_file,
        fmt::format("chosen_down<{}, {}>", element_type(problem.dtype), block.template_argument()),
        {static_cast<std::uint32_t>(quotient_up(shape.d, block.rows))},
        static_cast<std::uint32_t>(block.threads()), std::move(arguments.list));
    launch.shared_bytes = static_cast<std::uint32_t>(products_bytes(shape, block));
    return program;
  }

 private:
  Blocks blocks(const Problem& problem, const DeviceFacts& facts) const override {
    Blocks space{Block(problem)};
    const Shape shape = shape_of(problem);
    space.parameter("rows", "features of y of a block", Blocks::to<&Block::rows>, {8, 16, 32})
        .parameter("warps", "warps of a block, which share the experts", Blocks::to<&Block::warps>,
                   {4, 8, 16})
        .parameter("unroll", "16-byte loads of a row that a thread issues at once",
                   Blocks::to<&Block::unroll>, {1, 2, 4, 8})
        .parameter("k_parts", "warps that share an expert's k", Blocks::to<&Block::k_parts>,
                   {1, 2, 4})
        .parameter("l2_prefetch",
                   "1: all weights are asked for in L2 while the launch before still runs",
                   Blocks::to<&Block::l2_prefetch>, {0, 1})
        .when_absent(0);
    space.constraint("the bulk prefetch needs compute capability 9.0", {"l2_prefetch"},
                     [capability = facts.compute_capability](const Block& block) {
                       return block.l2_prefetch == 0 || capability >= 90;
                     });
    space.constraint(fmt::format("each choice's products must fit in the {} bytes of shared memory "
                                 "that a block can have",
                                 facts.shared_bytes_per_block),
                     {"rows", "k_parts"},
                     [shape, most = facts.shared_bytes_per_block](const Block& block) {
                       return products_bytes(shape, block) + 8192 <= most;
                     });
    space.constraint("every part of k needs a full round of loads", {"unroll", "k_parts"},
                     [k = shape.h](const Block& block) {
                       return block.k_parts == 1 ||
                              k >= block.k_step * block.unroll * block.k_parts;
                     });
    space.constraint(
        "k_parts above 1 is for few chosen experts, with at most 4 parts for each warp",
        {"warps", "k_parts"}, [experts = most_chosen(shape)](const Block& block) {
          return block.k_parts == 1 || experts * block.k_parts <= 4 * block.warps;
        });
    limit_registers(space, 1);
    return space;
  }
  // Measured on an H100: of eight loads of a row at once, which is all of k or more than of many
  // warps memory delivers, the first ones wait for the last.
  double longer(const Block& block, double) const override {
    const bool too_many = block.is_fp8() || block.warps == 16;
    return block.unroll == 8 && too_many ? 1.25 : 1;
  }
  // A warp has an expert, or a part of one: the k of a block is that of all of them.
  Weights weights(const Problem& problem) const override {
    const Shape shape = shape_of(problem);
    return {.operands = 1,
            .rows = static_cast<double>(shape.d),
            .k = static_cast<std::int64_t>(usually_chosen(problem) * static_cast<double>(shape.h)),
            .hidden = shape.h};
  }
  static std::int64_t products_bytes(const Shape& shape, const Block& block) {
    return 4 * block.k_parts * shape.rows() * block.rows;
  }
};

}  // namespace

std::vector<const Family*> decode_families() {
  static const ChosenGateUp gate_up;
  static const ChosenDown down;
  return {&gate_up, &down};
}

}  // namespace fftune::moe
