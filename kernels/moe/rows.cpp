// The families of the stages combine, combine_dx and weigh.
#include <fmt/format.h>

#include <algorithm>

#include "kernels/common/stage_family.hpp"
#include "kernels/moe/moe.hpp"

namespace fftune::moe {
namespace {

/// The time of reading and writing a stage's tensors once.
double seconds_of(const Problem& problem, const DeviceFacts& facts, const char* name) {
  constexpr double start_seconds = 2e-6;
  const double bandwidth = facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12;
  double bytes = 0;
  for (const StageSpec& stage : moe_ffn_op().stages(problem))
    if (stage.name == name) bytes = stage.bytes;
  return start_seconds + bytes / (0.9 * bandwidth);
}

/// Whether rows of so many columns are whole vectors of 16 bytes.
bool are_aligned(const Problem& problem, std::int64_t columns) {
  return columns * static_cast<std::int64_t>(dtype_bytes(wide_dtype(problem))) % 16 == 0;
}

/// combine and combine_dx: the rows' tensor, whether they have weights, and the sum.
struct Combination {
  const char *pass, *stage, *rows, *sums;
  bool weighted;
};
constexpr Combination forward{"fwd", stage_combine, "expert_out", "y", true};
constexpr Combination backward{"bwd", stage_combine_dx, "dx_rows", "dx", false};

class Combine final : public StageFamily {
 public:
  Combine(const Combination& of, std::string_view name, bool is_fallback)
      : StageFamily({.name = name,
                     .summary = is_fallback ? "an element a thread, in blocks of 256"
                                            : "16 bytes of a token a thread, eight rows in flight",
                     .stage = of.stage,
                     .pass = of.pass,
                     .sources = {"moe/combine.cu"},
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
        .constraint("at most half of a block's threads have nothing to do",
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
    while (threads < 256 && 2 * threads < 2 * vectors &&
           all / (2 * threads) >= 2 * std::max(facts.multiprocessors, 1))
      threads *= 2;
    return {{"threads", threads}};
  }
  std::optional<double> estimate(const Problem& problem, const DeviceFacts& facts,
                                 const Config&) const override {
    return seconds_of(problem, facts, of_.stage);
  }
  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Shape shape = shape_of(problem);
    const TensorPlaces places(moe_ffn_op().tensors(problem));
    const int threads = is_fallback() ? 256 : config.get("threads");
    const std::int64_t elements =
        is_fallback() ? 1 : static_cast<std::int64_t>(16 / dtype_bytes(wide_dtype(problem)));
    Program program;
    KernelLaunch& launch = append_kernel(
        program, "moe/combine.cu",
        fmt::format("combine_rows<{}, {}, {}, {}, {}>", element_type(wide_dtype(problem)),
                    shape.choices(), shape.top_k, !is_fallback(), threads),
        grid_of_matrix(shape.m, shape.d, elements * threads), static_cast<std::uint32_t>(threads),
        {tensor_of(places, of_.rows), tensor_of(places, "places"),
         of_.weighted && !weighs_before(problem) ? Argument{tensor_of(places, "weights")}
                                                 : Argument{std::int64_t{0}},
         has_residual(problem) ? Argument{tensor_of(places, "residual")}
                               : Argument{std::int64_t{0}},
         tensor_of(places, of_.sums), static_cast<std::int32_t>(shape.m), shape.d});
    launch.programmatic = facts.compute_capability >= 90;
    return program;
  }

 private:
  static std::int64_t vectors_of_row(const Problem& problem) {
    return quotient_up(problem.size("d"),
                       static_cast<std::int64_t>(16 / dtype_bytes(wide_dtype(problem))));
  }

  Combination of_;
};

class Weigh final : public StageFamily {
 public:
  Weigh()
      : StageFamily({.name = "weigh_rows",
                     .summary = "a block a choice, 16 bytes a thread where rows are aligned",
                     .stage = stage_weigh,
                     .pass = "bwd",
                     .sources = {"moe/weigh.cu"},
                     .is_fallback = true}) {}

  std::optional<double> estimate(const Problem& problem, const DeviceFacts& facts,
                                 const Config&) const override {
    return seconds_of(problem, facts, stage_weigh);
  }
  Program program(const Problem& problem, const DeviceFacts& facts, const Config&) const override {
    const Shape shape = shape_of(problem);
    const TensorPlaces places(moe_ffn_op().tensors(problem));
    std::vector<Argument> arguments;
    for (const char* name : {"d_gate", "d_up", "hidden", "up", "weights", "places", "d_weights",
                             "weighted_d_gate", "weighted_d_up", "weighted_hidden"})
      arguments.emplace_back(tensor_of(places, name));
    arguments.emplace_back(shape.rows());
    arguments.emplace_back(shape.h);
    Program program;
    KernelLaunch& launch =
        append_kernel(program, "moe/weigh.cu",
                      fmt::format("weigh_rows<{}, {}>", element_type(problem.dtype),
                                  are_aligned(problem, shape.h)),
                      {static_cast<std::uint32_t>(shape.rows())}, 256, std::move(arguments));
    launch.programmatic = facts.compute_capability >= 90;
    return program;
  }
};

/// The same on the CPU.
class CpuStage final : public StageFamily {
 public:
  CpuStage(std::string_view name, std::string_view summary, const char* stage, const char* pass,
           Program (*make)(const Problem&))
      : StageFamily({.name = name,
                     .summary = summary,
                     .device_kind = DeviceKind::cpu,
                     .stage = stage,
                     .pass = pass,
                     .sources = {"moe/cpu_families.cpp"},
                     .is_fallback = true}),
        make_(make) {}

  Program program(const Problem& problem, const DeviceFacts&, const Config&) const override {
    return make_(problem);
  }

 private:
  Program (*make_)(const Problem&);
};

}  // namespace

std::vector<const Family*> combine_families() {
  static const Combine fwd(forward, "combine_rows", false),
      fwd_fallback(forward, "combine_fallback", true), bwd(backward, "combine_dx_rows", false),
      bwd_fallback(backward, "combine_dx_fallback", true);
  static const CpuStage cpu("cpu_combine", "a token a task", stage_combine, "fwd",
                            cpu_combine_program),
      cpu_dx("cpu_combine_dx", "a token a task", stage_combine_dx, "bwd", cpu_combine_program);
  return {&fwd, &fwd_fallback, &cpu, &bwd, &bwd_fallback, &cpu_dx};
}

std::vector<const Family*> weigh_families() {
  static const Weigh rows;
  static const CpuStage cpu("cpu_weigh", "a choice a task", stage_weigh, "bwd", cpu_weigh_program);
  return {&rows, &cpu};
}

}  // namespace fftune::moe
