// A block, or a cluster of blocks, for each row: cross_entropy/rows.cu.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/common/stage_family.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/cross_entropy/cross_entropy.hpp"

namespace fftune::cross_entropy {
namespace {

Argument or_null(const std::optional<Pointer>& pointer) {
  return pointer ? argument_of(*pointer) : Argument{std::int64_t{0}};
}

Space space(const Problem&, const DeviceFacts&) {
  return Space().parameter("threads", "threads of a block", {128, 256, 512, 1024});
}

Config default_config(const Problem&, const DeviceFacts&) {
  return {{"threads", default_block}};
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  return program_of(problem, facts, [&](Program& program, const Form& form, const Rows& rows) {
    append_rows(program, form, rows, facts, {.threads = config.at("threads")});
  });
}

/// The elements of a thread's access to a row.
std::int64_t vector_elements(std::int64_t vocab, DType dtype) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  return widest_vector(vocab * bytes) / bytes;
}

}  // namespace

std::int64_t held_vectors(std::int64_t vocab, DType dtype, const RowBlocks& blocks) {
  constexpr std::int64_t most_held = 8;  // 32 of 64 registers
  const std::int64_t count = vector_elements(vocab, dtype);
  if (count * static_cast<std::int64_t>(dtype_bytes(dtype)) < 16) return 0;
  const std::int64_t held = quotient_up(quotient_up(vocab / count, blocks.cluster), blocks.threads);
  return held <= most_held ? held : 0;
}

void append_rows(Program& program, const Form& form, const Rows& rows, const DeviceFacts& facts,
                 const RowBlocks& blocks) {
  const bool divides = rows.dlogits && form.reduction == Reduction::mean;
  const bool has_clusters = facts.compute_capability >= 90;
  const std::int64_t count = vector_elements(rows.vocab, rows.dtype);
  const std::int64_t held =
      has_clusters && rows.loss && rows.dlogits ? held_vectors(rows.vocab, rows.dtype, blocks) : 0;
  const std::string kind =
      fmt::format("{}, {}", element_type(rows.dtype),
                  StructText("cross_entropy_form", "loss", rows.loss.has_value(), "gradient",
                             rows.dlogits.has_value(), "smooths", form.smoothing > 0, "weighs",
                             form.class_weights, "caps", form.softcap > 0, "entropy",
                             rows.entropy.has_value()));
  std::vector<Argument> arguments{argument_of(rows.logits),
                                  argument_of(rows.labels),
                                  or_null(rows.class_weights),
                                  divides ? or_null(rows.items) : Argument{std::int64_t{0}},
                                  or_null(rows.dloss),
                                  argument_of(rows.lse),
                                  or_null(rows.loss),
                                  or_null(rows.logprob),
                                  or_null(rows.entropy),
                                  or_null(rows.dlogits),
                                  form.ignored,
                                  static_cast<std::int32_t>(rows.vocab),
                                  std::int32_t{form.reduction == Reduction::none},
                                  form.smoothing,
                                  form.z_loss,
                                  form.softcap,
                                  static_cast<std::int32_t>(form.whole)};
  const auto threads = static_cast<std::uint32_t>(blocks.threads);
  std::string kernel = fmt::format("cross_entropy_rows<{}, {}, {}>", kind, count, threads);
  std::int64_t grid = rows.rows, part = 0;
  if (held > 0) {
    kernel = fmt::format("cross_entropy_held<{}, {}, {}, {}>", kind, threads, held, blocks.cluster);
    part = quotient_up(rows.vocab / count, blocks.cluster);
    arguments.insert(arguments.end(), {static_cast<std::int32_t>(part), rows.rows});
    // As many clusters as are resident. Those of more than two blocks do not fill every GPC.
    std::int64_t clusters = 1024 / blocks.threads * facts.multiprocessors / blocks.cluster;
    if (blocks.cluster > 2) clusters = clusters * 91 / 100;
    grid = std::clamp<std::int64_t>(clusters, 1, rows.rows) * blocks.cluster;
  }
  KernelLaunch& launch =
      append_kernel(program, kernel_file, kernel, {static_cast<std::uint32_t>(grid)}, threads,
                    std::move(arguments));
  launch.programmatic = has_clusters;
  if (held > 0) launch.cluster.x = static_cast<std::uint32_t>(blocks.cluster);
  launch.shared_bytes = static_cast<std::uint32_t>(part * 16);
}

void append_total(Program& program, const Form& form, const Pointer& losses, const Pointer& total,
                  const std::optional<Pointer>& items, std::int64_t rows,
                  const DeviceFacts& facts) {
  const bool divides = form.reduction == Reduction::mean;
  if (facts.kind == DeviceKind::cpu) {
    program.steps.emplace_back(HostFunction([=](const HostCall& call) {
      const auto* const values = reinterpret_cast<const float*>(address_of(call, losses));
      double sum = 0;
      for (std::int64_t row = 0; row < rows; ++row) sum += values[row];
      if (divides) sum /= *reinterpret_cast<const float*>(address_of(call, *items));
      *reinterpret_cast<float*>(address_of(call, total)) = static_cast<float>(sum);
    }));
    return;
  }
  append_pdl_kernel(program, facts, kernel_file, "cross_entropy_total", {1}, 1024,
                    {argument_of(losses), divides ? or_null(items) : Argument{std::int64_t{0}},
                     argument_of(total), rows});
}

std::vector<const Family*> cuda_families() {
  const auto family = [](const char* name, const char* stage, const char* pass) {
    return StageFamily({.name = name,
                        .summary = "a block a row, read for its sums and again for the gradient",
                        .stage = stage,
                        .pass = pass,
                        .sources = {kernel_file},
                        .is_fallback = true,
                        .search = {space, default_config},
                        .program = program});
  };
  static const StageFamily forward = family("loss_rows", stage_loss, "fwd"),
                           backward = family("gradient_rows", stage_gradient, "bwd");
  return {&forward, &backward};
}

}  // namespace fftune::cross_entropy
