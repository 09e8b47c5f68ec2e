#include "kernels/ffn/baselines.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/common/activation.hpp"
#include "kernels/common/cpu_vector.hpp"
#include "kernels/ffn/baseline_steps.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/ffn/norm.hpp"

namespace fftune::ffn {
namespace {

/// One operand of a product, and its scale if it is quantised.
struct Operand {
  std::size_t elements = 0;
  std::size_t scale = Places::none;
};

LibraryGemm product(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, const Operand& a,
                    const Operand& b, std::size_t c) {
  LibraryGemm gemm{
      dtype, m, n, k, TensorArgument{a.elements}, TensorArgument{b.elements}, TensorArgument{c}};
  if (a.scale != Places::none) gemm.a_scale = TensorArgument{a.scale};
  if (b.scale != Places::none) gemm.b_scale = TensorArgument{b.scale};
  return gemm;
}

/// hidden = act(gate) * up on the CPU, by all threads and in vectors.
HostFunction gate_on_host(const Problem& problem, const DeviceFacts& facts, std::size_t gate_at,
                          std::size_t up_at) {
  const std::size_t out_at = places_of(problem).hidden;
  const auto elements =
      static_cast<std::size_t>(problem.size("m")) * static_cast<std::size_t>(problem.size("h"));
  const auto activation = parse_activation(problem.option("act"));
  const VectorKernels& kernels = vector_kernels(facts.arch);
  return [=, dtype = problem.dtype, &kernels](const HostCall& call) {
    constexpr std::size_t chunk = 4096;
    const auto tasks = static_cast<int>((elements + chunk - 1) / chunk);
    call.parallel.run(tasks, call.parallel.max_threads(), [&](int task) {
      const std::size_t first = static_cast<std::size_t>(task) * chunk;
      const std::size_t count = std::min(chunk, elements - first);
      if (dtype == DType::f32) {
        const auto* gate = static_cast<const float*>(call.tensors[gate_at]) + first;
        const auto* up = static_cast<const float*>(call.tensors[up_at]) + first;
        auto* out = static_cast<float*>(call.tensors[out_at]) + first;
        return kernels.gated(activation, gate, up, out, count);
      }
      float gate[chunk], up[chunk];
      kernels.widen(static_cast<const std::uint16_t*>(call.tensors[gate_at]) + first, gate, count);
      kernels.widen(static_cast<const std::uint16_t*>(call.tensors[up_at]) + first, up, count);
      kernels.gated(activation, gate, up, gate, count);
      kernels.narrow(gate, static_cast<std::uint16_t*>(call.tensors[out_at]) + first, count);
    });
  };
}

/// y += bias + residual on the CPU, by all threads.
HostFunction add_on_host(const Problem& problem) {
  const Form form = form_of(problem);
  const Places at = places_of(problem);
  const auto dtype = problem.dtype;
  const auto columns = static_cast<std::size_t>(problem.size("d"));
  const auto rows = static_cast<int>(problem.size("m"));
  return [=](const HostCall& call) {
    const auto row_of = [&](std::size_t place, std::size_t row) {
      return static_cast<std::byte*>(call.tensors[place]) + row * columns * dtype_bytes(dtype);
    };
    call.parallel.run(rows, call.parallel.max_threads(), [&](int row) {
      std::vector<float> sum(columns), term(columns);
      decode(dtype, row_of(at.y, row), sum);
      const auto add = [&](const std::byte* from) {
        decode(dtype, from, term);
        for (std::size_t i = 0; i < columns; ++i) sum[i] += term[i];
      };
      if (form.bias) add(row_of(at.b_down, 0));
      if (form.residual) add(row_of(at.residual, row));
      encode(dtype, sum, row_of(at.y, row));
    });
  };
}

/// Gate and up each by a product of its own.
Baseline unfused(const Problem& problem, const DeviceFacts& facts) {
  const auto [m, d, h] = shape_of(problem);
  const auto dtype = problem.dtype;
  const Places at = places_of(problem);
  const bool saves = form_of(problem).saves;
  const std::size_t gate = saves ? at.gate : at.count;
  const std::size_t up = saves ? at.up : at.count + 1;
  Baseline baseline;
  baseline.name = "unfused";
  if (!saves)
    baseline.extra = {{"gate", wide_dtype(problem), {m, h}, Role::intermediate, 1},
                      {"up", wide_dtype(problem), {m, h}, Role::intermediate, 1}};
  append_norm(baseline, problem, facts);
  auto& program = baseline.program;
  program.host_tensors = at.count + baseline.extra.size();
  const Operand x{at.gate_up_x, at.x_scale};
  program.steps.emplace_back(product(dtype, m, h, d, x, {at.w_gate, at.w_gate_scale}, gate));
  program.steps.emplace_back(product(dtype, m, h, d, x, {at.w_up, at.w_up_scale}, up));
  if (facts.kind == DeviceKind::cpu) {
    baseline.summary = "three OpenBLAS products and a vectorised act * mul, all on all threads";
    program.steps.emplace_back(gate_on_host(problem, facts, gate, up));
  } else {
    baseline.summary = "three cuBLASLt products and an act * mul kernel";
    append_silu_mul(program, problem, TensorArgument{gate}, TensorArgument{up},
                    TensorArgument{at.hidden});
  }
  program.steps.emplace_back(
      product(dtype, m, d, h, {at.hidden, at.hidden_scale}, {at.w_down, at.w_down_scale}, at.y));
  if (facts.kind == DeviceKind::cuda)
    append_add_rows(program, problem);
  else if (form_of(problem).adds())
    program.steps.emplace_back(add_on_host(problem));
  return baseline;
}

/// Gate and up as one product with their weights stacked, which needs a copy of the weights. What
/// it saves for a backward pass is that product, packed.
Baseline merged(const Problem& problem, const DeviceFacts& facts) {
  const auto [m, d, h] = shape_of(problem);
  const auto dtype = problem.dtype;
  const Places at = places_of(problem);
  const std::size_t weights = at.count;
  const std::size_t packed = at.count + 1;
  Baseline baseline;
  baseline.name = "merged";
  baseline.summary = "cuBLASLt: gate and up as one product, an act * mul kernel, and down";
  const bool quantised = is_quantised(problem);
  const double by_d = 1 / std::sqrt(static_cast<double>(d));
  baseline.extra = {{"w_gate_up", dtype, {2 * h, d}, Role::input, quantised ? 16 : by_d},
                    {"gate_up", wide_dtype(problem), {m, 2 * h}, Role::intermediate, 1}};
  const std::size_t scale = quantised ? at.count + 2 : Places::none;
  if (quantised)
    baseline.extra.push_back({"w_gate_up_scale", DType::f32, {1}, Role::input, 0, by_d / 16});
  append_norm(baseline, problem, facts);
  auto& program = baseline.program;
  program.steps.emplace_back(
      product(dtype, m, 2 * h, d, {at.gate_up_x, at.x_scale}, {weights, scale}, packed));
  append_silu_mul(program, problem, TensorArgument{packed}, std::nullopt,
                  TensorArgument{at.hidden});
  program.steps.emplace_back(
      product(dtype, m, d, h, {at.hidden, at.hidden_scale}, {at.w_down, at.w_down_scale}, at.y));
  append_add_rows(program, problem);
  return baseline;
}

}  // namespace

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) {
  if (has_block_scales(problem)) return {};  // the libraries' take them in an order of their own
  if (facts.kind == DeviceKind::cpu && is_quantised(problem)) return {};
  if (facts.kind == DeviceKind::cpu) return {unfused(problem, facts)};
  return {unfused(problem, facts), merged(problem, facts)};
}

}  // namespace fftune::ffn
