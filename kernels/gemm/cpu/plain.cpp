// The CPU's fallback: plain loops over GEMMs of any size, type, layout, grouping and scaling.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/gemm/cpu/host_gemm.hpp"
#include "kernels/gemm/cpu/work.hpp"
#include "kernels/gemm/engine.hpp"

namespace fftune {
namespace {

using namespace gemm_cpu;

constexpr std::int64_t most_columns = 512;   // of a task: its sums lie on the stack
constexpr std::int64_t slice = scale_block;  // of k
static_assert(most_columns % scale_block == 0);

float dot(const float* a, const float* b, std::int64_t count) {
  constexpr std::size_t lanes = 8;  // partial sums, which a compiler may keep in a vector
  float partial[lanes] = {};
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i)
    partial[i % lanes] += a[i] * b[i];
  float sum = 0;
  for (const float part : partial) sum += part;
  return sum;
}

/// The work of a task: columns of one row of C, with all accumulators.
struct Part {
  std::int64_t group = 0;
  int output = 0;
  std::int64_t a_row = 0;
  Range columns;
  Selection a_k, b_k;
};

/// sums [columns] += a · bᵀ over the elements [at, at + depth) of k, where `a` holds those of the
/// row.
void add_products(const HostGemm& host, const HostCall& call, const Part& part, int index,
                  const float* a, Selection b_k, float* sums) {
  float values[most_columns];
  const std::int64_t columns = part.columns.size();
  if (host.gemm.b_major == Major::k) {
    for (std::int64_t j = 0; j < columns; ++j) {
      const auto b = host.b_view(call, index, part.group, {part.columns.first + j, 1}, b_k, values);
      sums[j] += dot(a, b.data, b_k.count);
    }
    return;
  }
  for (std::int64_t i = 0; i < b_k.count; ++i) {
    const auto b =
        host.b_view(call, index, part.group, {part.columns.first, columns}, b_k.part(i, 1), values);
    for (std::int64_t j = 0; j < columns; ++j) sums[j] += a[i] * b.data[j];
  }
}

float scale_at(const HostCall& call, const Matrix& scales, std::int64_t group, std::int64_t place) {
  return *reinterpret_cast<const float*>(scales.at(call, group, place));
}

/// sums [columns] = a · bᵀ of one B operand, or of both pairs.
void multiply(const HostGemm& host, const HostCall& call, const Part& part, int operand,
              float* sums) {
  const GemmProblem& gemm = host.gemm;
  const bool by_channel = gemm.quantisation.scaling == Scaling::channel;
  const bool in_blocks = gemm.quantisation.scaling == Scaling::block || by_channel;
  const bool a_by_block = !by_channel || gemm.quantisation.a_scaled_by_block;
  const bool by_k = gemm.groups.by == Grouping::reduction;
  const std::int64_t group = by_k ? 0 : part.group;  // of B's scales
  const std::int64_t columns = part.columns.size();
  const std::int64_t blocks = ceil_div(gemm.k, scale_block);
  // The tokens of a group may share no block of scales.
  const std::int64_t step = in_blocks && by_k ? 1 : slice;
  std::fill_n(sums, columns, 0.0f);
  for (int pair = 0; pair < gemm.k_pairs(); ++pair)
    for (std::int64_t k = 0; k < part.a_k.count; k += step) {
      const std::int64_t depth = std::min(step, part.a_k.count - k);
      const int index = pair + operand;
      float a_room[slice], products[most_columns] = {};
      host.load_a(call, pair + part.output, part.a_row, part.a_k.part(k, depth), a_room);
      add_products(host, call, part, index, a_room, part.b_k.part(k, depth), products);
      for (std::int64_t j = 0; j < columns; ++j) {
        float scale = 1;
        if (in_blocks) {
          const std::int64_t row = (part.columns.first + j) / scale_block;
          scale =
              scale_at(call, host.a_scale, 0,
                       a_by_block ? part.a_row * blocks + part.a_k[k] / scale_block : part.a_row) *
              scale_at(
                  call, host.b_scale[static_cast<std::size_t>(index)], group,
                  by_channel ? part.columns.first + j : row * blocks + part.b_k[k] / scale_block);
        }
        sums[j] += products[j] * scale;
      }
    }
  if (gemm.quantisation.scaling != Scaling::tensor) return;
  const float scale = scale_at(call, host.a_scale, 0, 0) *
                      scale_at(call, host.b_scale[static_cast<std::size_t>(operand)], group, 0);
  for (std::int64_t j = 0; j < columns; ++j) sums[j] *= scale;
}

/// One task for each row of C, output, group with a C of its own, and 512 columns.
void run(const HostGemm& host, const HostCall& call, std::byte* order) {
  const GemmProblem& gemm = host.gemm;
  const SortedGroups groups = host.sort(call, order);
  const bool by_k = gemm.groups.by == Grouping::reduction;
  // A QKV product is divided at whole heads.
  const std::int64_t head =
      gemm.epilogue.kind == EpilogueKind::qkv ? gemm.epilogue.qkv.form.dim : 1;
  const std::int64_t width = most_columns / head * head;
  const std::int64_t across = ceil_div(gemm.n, width);
  // Sorted rows before the first group, and after the last, belong to none.
  const std::int64_t first = by_k ? 0 : groups.range(0).first;
  const std::int64_t last = by_k ? groups.count * gemm.m : groups.range(groups.count - 1).last;
  const auto run_task = [&](std::size_t, std::int64_t task) {
    const std::int64_t row = first + task / across / gemm.outputs();
    Part part{.output = static_cast<int>(task / across % gemm.outputs()),
              .a_row = row,
              .columns = {task % across * width, 0},
              .a_k = {0, gemm.k},
              .b_k = {0, gemm.k}};
    part.columns.last = std::min(part.columns.first + width, gemm.n);
    std::int64_t c_row = row;
    if (by_k) {
      part.group = row / gemm.m;
      part.a_row = c_row = row % gemm.m;
      part.a_k = groups.select(groups.range(part.group), gemm.a_sorted);
      part.b_k = groups.select(groups.range(part.group), gemm.b_sorted);
    } else if (gemm.groups.any()) {
      while (row >= groups.range(part.group).last) ++part.group;
      part.a_row = groups.select({row, row + 1}, gemm.a_sorted)[0];
      c_row = groups.select({row, row + 1}, gemm.c_sorted)[0];
    }
    float sums[2][most_columns];
    for (int operand = 0; operand < gemm.b_operands(); ++operand)
      multiply(host, call, part, operand, sums[operand]);
    host.finish(call, part.group, part.output, c_row, part.columns.first, sums[0], sums[1],
                part.columns.size());
  };
  deal(call.parallel, call.parallel.max_threads(), (last - first) * gemm.outputs() * across,
       run_task);
}

std::optional<std::string> can_implement(const GemmChain&, const DeviceFacts&) {
  return std::nullopt;
}

void append(Program& program, const GemmChain& chain, const TensorPlaces& places,
            const DeviceFacts& facts, const Config&) {
  for (const GemmProblem& gemm : chain) {
    const HostGemm host(gemm, places, facts);
    const std::size_t order = program.scratch.size();
    program.scratch.push_back({host.order_bytes(), false});
    program.steps.emplace_back(HostFunction(
        [host, order](const HostCall& call) { run(host, call, call.scratch[order]); }));
  }
}

}  // namespace

constinit const Engine cpu_plain_engine{.name = "cpu_plain",
                                        .device_kind = DeviceKind::cpu,
                                        .is_fallback = true,
                                        .can_implement = can_implement,
                                        .append = append,
                                        .batch_invariant = true,
                                        .sources = {"gemm/cpu/plain.cpp"}};

}  // namespace fftune
