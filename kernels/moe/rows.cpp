// The families of the stages combine, combine_dx, weigh and d_biases.
#include <fmt/format.h>

#include <algorithm>

#include "kernels/common/op_parts.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/moe/moe.hpp"

namespace fftune::moe {
namespace {

/// A family of a stage whose time is that of reading and writing its tensors once.
class RowStage : public StageFamily {
 public:
  using StageFamily::StageFamily;

  std::optional<double> estimate(const Problem& problem, const DeviceFacts& facts,
                                 const Config&) const override {
    constexpr double start_seconds = 2e-6;
    const double bandwidth = facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12;
    double bytes = 0;
    for (const StageSpec& stage : moe_ffn_op().stages(problem))
      if (stage.name == stages().front()) bytes = stage.bytes;
    return start_seconds + bytes / (0.9 * bandwidth);
  }
};

/// Whether a row of this many columns is whole vectors of 16 bytes.
bool are_aligned(const Problem& problem, std::int64_t columns) {
  return columns * static_cast<std::int64_t>(dtype_bytes(wide_dtype(problem))) % 16 == 0;
}

/// combine and combine_dx: the rows' tensor, whether they have weights, and the sum.
struct Combination {
  const char *pass, *stage, *rows, *sums;
  bool weighted;
  std::vector<std::string> sources;
};

class Combine final : public RowStage {
 public:
  Combine(const Combination& of, std::string_view name, bool is_fallback)
      : RowStage({.name = name,
                  .summary = is_fallback ? "an element a thread, in blocks of 256"
                                         : "16 bytes of a token a thread, eight rows in flight",
                  .stage = of.stage,
                  .pass = of.pass,
                  .sources = of.sources,
                  .is_fallback = is_fallback}),
        of_(of) {}

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto reason = StageFamily::refusal(problem, facts)) return reason;
    if (is_fallback() || are_aligned(problem, problem.size("d"))) return std::nullopt;
    return fmt::format("rows of d={} elements are not 16-byte aligned", problem.size("d"));
  }
  Space space(const Problem& problem, const DeviceFacts&) const override {
    if (is_fallback()) return {};
    const std::int64_t vectors = vectors_of_row(problem);
    return Space()
        .parameter("threads", "threads of a block, each with 16 bytes of the same token",
                   {32, 64, 128, 256, 512})
        .constraint("at most half of a block's threads may be idle",
                    [vectors](const Config& c) {
                      return c.at("threads") == 32 || c.at("threads") < 2 * vectors;
                    },
                    {"threads"});
  }
  // Small blocks spread a few tokens over the SMs; of many, a block may have a whole row.
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    if (is_fallback()) return {};
    const std::int64_t all = problem.size("m") * vectors_of_row(problem);
    const std::int64_t vectors = vectors_of_row(problem);
    std::int64_t threads = 32;
    while (
        threads < 256 && 2 * threads < 2 * vectors &&
        (has_whole_rows(problem) || all / (2 * threads) >= 2 * std::max(facts.multiprocessors, 1)))
      threads *= 2;
    return {{"threads", threads}};
  }
  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Shape shape = shape_of(problem);
    const TensorPlaces places(moe_ffn_op().tensors(problem));
    const int threads = is_fallback() ? 256 : config.get("threads");
    const std::int64_t elements =
        is_fallback() ? 1 : static_cast<std::int64_t>(16 / dtype_bytes(wide_dtype(problem)));
    const std::string arguments =
        fmt::format("{}, {}, {}, {}, {}", element_type(wide_dtype(problem)), shape.choices(),
                    shape.top_k, !is_fallback(), threads);
    Program program;
    if (has_whole_rows(problem)) {
      append_pdl_kernel(
          program, facts, "moe/weigh.cu", fmt::format("combine_before<{}>", arguments),
          {static_cast<std::uint32_t>(std::min<std::int64_t>(shape.m, 65535))},
          static_cast<std::uint32_t>(threads),
          {tensor_of(places, "dx_rows"), tensor_of(places, "places"), tensor_of(places, "weights"),
           tensor_of(places, "x"), tensor_of(places, "dx"), tensor_of(places, "d_weights"),
           static_cast<std::int32_t>(shape.m), shape.d});
      return program;
    }
    append_pdl_kernel(
        program, facts, "moe/combine.cu", fmt::format("combine_rows<{}>", arguments),
        grid_of_matrix(shape.m, shape.d, elements * threads), static_cast<std::uint32_t>(threads),
        {tensor_of(places, of_.rows), tensor_of(places, "places"),
         tensor_or_null(of_.weighted && !weighs_before(problem) ? places.at("weights") : absent),
         tensor_or_null(has_residual(problem) ? places.at("residual") : absent),
         tensor_of(places, of_.sums), static_cast<std::int32_t>(shape.m), shape.d});
    return program;
  }

 private:
  /// Whether a block has all columns of a token, for the gradients of its weights.
  static bool has_whole_rows(const Problem& problem) {
    return problem.pass == "bwd" && weighs_before(problem);
  }
  static std::int64_t vectors_of_row(const Problem& problem) {
    return quotient_up(problem.size("d"),
                       static_cast<std::int64_t>(16 / dtype_bytes(wide_dtype(problem))));
  }

  Combination of_;
};

/// The enumerator that device code has for it.
const char* packing_type(Packing packing) {
  if (packing == Packing::separate) return "fftune::packing::separate";
  return packing == Packing::halves ? "fftune::packing::halves" : "fftune::packing::interleaved";
}

Program weigh_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  const Shape shape = shape_of(problem);
  const TensorPlaces places(moe_ffn_op().tensors(problem));
  const bool before = weighs_before(problem), biased = reads_down_bias(problem);
  std::vector<Argument> arguments;
  const auto add = [&](bool is_there, std::string_view name) {
    arguments.push_back(tensor_or_null(is_there ? places.at(name) : absent));
  };
  for (const char* name : {"d_hidden", "gate", "up", "weights", "places"}) add(true, name);
  for (const char* name : {own_ids_of(problem), "dy", "b_down"}) add(biased, name);
  for (const bool weighted : {true, false}) {
    const auto names = gate_gradients(problem, weighted);
    for (std::size_t i = 0; i < 2; ++i)
      add((weighted || before) && i < names.size(), names[std::min(i, names.size() - 1)]);
  }
  add(!before || !recomputes(problem), hidden_of_gradient(problem));
  add(!before, "d_weights");
  arguments.emplace_back(shape.rows());
  for (const std::int64_t size : {shape.top_k, shape.shared})
    arguments.emplace_back(static_cast<std::int32_t>(size));
  for (const std::int64_t size : {shape.h, shape.d}) arguments.emplace_back(size);
  const bool aligned = are_aligned(problem, shape.h) && are_aligned(problem, shape.d);
  const std::int64_t vectors =
      aligned ? shape.h * static_cast<std::int64_t>(dtype_bytes(problem.dtype)) / 16 : shape.h;
  const std::uint32_t threads = vectors <= 64 ? 64 : vectors <= 128 ? 128 : 256;
  return pdl_program(
      facts, "moe/weigh.cu",
      fmt::format("weigh_rows<{}, {}, {}>", element_type(problem.dtype),
                  activation_type(parse_activation(problem.option("act"))),
                  StructText("weigh_config", "gate_up", packing_type(packing_of(problem)), "before",
                             before, "aligned", aligned, "threads", threads)),
      {static_cast<std::uint32_t>(shape.rows())}, threads, std::move(arguments));
}

std::optional<std::string> refuse_frozen(const Problem& problem, const DeviceFacts&) {
  if (is_frozen(problem)) return "it is for frozen=no";
  return std::nullopt;
}

Program d_biases_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  const Shape shape = shape_of(problem);
  const TensorPlaces places(moe_ffn_op().tensors(problem));
  Program program;
  for (const BiasGradient& gradient : bias_gradients(problem)) {
    const bool of_tokens = gradient.rows == "dy";
    const auto tensor_if = [&](bool is_there, const char* name) {
      return tensor_or_null(is_there ? places.at(name) : absent);
    };
    append_pdl_kernel(program, facts, "moe/d_biases.cu",
                      fmt::format("sum_expert_rows<{}>", element_type(problem.dtype)),
                      {static_cast<std::uint32_t>(quotient_up(gradient.width, std::int64_t{32})),
                       static_cast<std::uint32_t>(shape.all_experts())},
                      512,
                      {tensor_of(places, gradient.rows), tensor_of(places, "offsets"),
                       tensor_if(of_tokens, "tokens"),
                       tensor_if(of_tokens && !weighs_before(problem), "row_weights"),
                       tensor_or_null(places, initial_name(gradient.bias)),
                       tensor_of(places, gradient.bias), gradient.width});
  }
  return program;
}

/// A family of such a stage on the CPU.
StageFamily cpu_family(StageFamilyFacts facts) {
  facts.sources = {"moe/cpu_families.cpp"};
  return cpu_fallback(std::move(facts));
}

}  // namespace

std::vector<const Family*> combine_families() {
  static const Combination forward{"fwd", stage_combine, "expert_out",
                                   "y",   true,          {"moe/combine.cu"}};
  static const Combination backward{
      "bwd", stage_combine_dx, "dx_rows", "dx", false, {"moe/combine.cu", "moe/weigh.cu"}};
  static const Combine fwd(forward, "combine_rows", false),
      fwd_fallback(forward, "combine_fallback", true), bwd(backward, "combine_dx_rows", false),
      bwd_fallback(backward, "combine_dx_fallback", true);
  static const StageFamily cpu = cpu_family({.name = "cpu_combine",
                                             .summary = "a token a task",
                                             .stage = stage_combine,
                                             .pass = "fwd",
                                             .program = cpu_combine_program}),
                           cpu_dx = cpu_family({.name = "cpu_combine_dx",
                                                .summary = "a token a task",
                                                .stage = stage_combine_dx,
                                                .pass = "bwd",
                                                .program = cpu_combine_program});
  return {&fwd, &fwd_fallback, &cpu, &bwd, &bwd_fallback, &cpu_dx};
}

std::vector<const Family*> weigh_families() {
  static const RowStage rows(
      {.name = "weigh_rows",
       .summary = "a block a choice, 16 bytes a thread where rows are aligned",
       .stage = stage_weigh,
       .pass = "bwd",
       .sources = {"moe/weigh.cu"},
       .is_fallback = true,
       .program = weigh_program});
  static const StageFamily cpu = cpu_family({.name = "cpu_weigh",
                                             .summary = "a choice a task",
                                             .stage = stage_weigh,
                                             .pass = "bwd",
                                             .program = cpu_weigh_program});
  return {&rows, &cpu};
}

std::vector<const Family*> d_biases_families() {
  static const RowStage sums({.name = "d_biases",
                              .summary = "sums of an expert's rows, a launch for each bias",
                              .stage = stage_d_biases,
                              .pass = "bwd",
                              .needs = {"bias", "all"},
                              .sources = {"moe/d_biases.cu"},
                              .is_fallback = true,
                              .refusal = refuse_frozen,
                              .program = d_biases_program});
  static const StageFamily cpu = cpu_family({.name = "cpu_d_biases",
                                             .summary = "an expert a task",
                                             .stage = stage_d_biases,
                                             .pass = "bwd",
                                             .needs = {"bias", "all"},
                                             .refusal = refuse_frozen,
                                             .program = cpu_d_biases_program});
  return {&sums, &cpu};
}

}  // namespace fftune::moe
