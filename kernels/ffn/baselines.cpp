#include "kernels/ffn/ffn.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common/activation.hpp"
#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/ffn/norm.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/library_gemm.hpp"

namespace fftune::ffn {
namespace {

constexpr const char* kernel_file = "ffn/baselines.cu";

/// Appends a kernel over [rows, columns], 16 bytes a thread.
void append_rows(Program& program, const std::string& expression, DType dtype, std::int64_t rows,
                 std::int64_t columns, std::vector<Argument> arguments) {
  constexpr std::uint32_t threads = 256;
  const auto elements = static_cast<std::int64_t>(16 / dtype_bytes(dtype));
  arguments.insert(arguments.end(), {rows, columns});
  append_kernel(program, kernel_file, expression, grid_of_matrix(rows, columns, elements * threads),
                threads, std::move(arguments));
}

/// Calls body(kernels, activation, of, h) for every row of tensors [m,h] on the CPU, by all
/// threads; of(place) is the row of a tensor.
template <class Body>
void append_host_rows(Program& program, const Problem& problem, const DeviceFacts& facts,
                      const Body& body) {
  const auto [m, d, h] = shape_of(problem);
  program.steps.emplace_back(
      HostFunction([=, rows = static_cast<int>(m), columns = static_cast<std::size_t>(h),
                    activation = parse_activation(problem.option("act")), dtype = problem.dtype,
                    kernels = &row_kernels(facts.arch, problem.dtype)](const HostCall& call) {
        call.parallel.run(rows, call.parallel.max_threads(), [&](int row) {
          const auto of = [&](std::size_t place) {
            return static_cast<std::byte*>(call.tensors[place]) +
                   static_cast<std::size_t>(row) * columns * dtype_bytes(dtype);
          };
          body(*kernels, activation, of, columns);
        });
      }));
}

/// y += bias + residual on the CPU, by all threads.
HostFunction add_on_host(const Problem& problem, const TensorPlaces& places) {
  const auto dtype = problem.dtype;
  const auto columns = static_cast<std::size_t>(problem.size("d"));
  const auto rows = static_cast<int>(problem.size("m"));
  const std::size_t y = places.at("y"), bias = places.at("b_down"),
                    residual = places.at("residual");
  return [=](const HostCall& call) {
    const auto row_of = [&](std::size_t place, std::size_t row) {
      return static_cast<std::byte*>(call.tensors[place]) + row * columns * dtype_bytes(dtype);
    };
    call.parallel.run(rows, call.parallel.max_threads(), [&](int row) {
      std::vector<float> sum(columns), term(columns);
      decode(dtype, row_of(y, row), sum);
      const auto add = [&](const std::byte* from) {
        decode(dtype, from, term);
        for (std::size_t i = 0; i < columns; ++i) sum[i] += term[i];
      };
      if (bias != absent) add(row_of(bias, 0));
      if (residual != absent) add(row_of(residual, row));
      encode(dtype, sum, row_of(y, row));
    });
  };
}

/// y += bias + residual, those that the problem's form has, if any.
void append_adding(Program& program, const Problem& problem, const DeviceFacts& facts,
                   const TensorPlaces& places) {
  if (!form_of(problem).adds()) return;
  if (facts.kind == DeviceKind::cpu) {
    program.steps.emplace_back(add_on_host(problem, places));
    return;
  }
  const DType wide = wide_dtype(problem);
  append_rows(program, fmt::format("add_rows<{}>", element_type(wide)), wide, problem.size("m"),
              problem.size("d"),
              {tensor_of(places, "y"), tensor_or_null(places.at("b_down")),
               tensor_or_null(places.at("residual"))});
}

/// y = hidden·w_downᵀ, and the additions to it.
void append_down(Program& program, const Problem& problem, const DeviceFacts& facts,
                 const TensorPlaces& places) {
  GemmProblem down = down_gemm(problem);
  down.epilogue = {};
  append_library_gemms(program, down, places);
  append_adding(program, problem, facts, places);
}

/// Gate and up each by a product of its own.
Baseline unfused(const Problem& problem, const DeviceFacts& facts) {
  const auto [m, d, h] = shape_of(problem);
  Baseline baseline;
  baseline.name = "unfused";
  baseline.summary = facts.kind == DeviceKind::cpu
                         ? "three OpenBLAS products and a vectorised act * mul, all on all threads"
                         : "three cuBLASLt products and an act * mul kernel";
  if (!form_of(problem).saves)
    baseline.extra = {{"gate", wide_dtype(problem), {m, h}, Role::intermediate, 1},
                      {"up", wide_dtype(problem), {m, h}, Role::intermediate, 1}};
  append_norm(baseline, problem, facts);
  const TensorPlaces places(ffn_op().tensors(problem), baseline.extra);
  Program& program = baseline.program;
  program.host_tensors = places.count();
  append_library_gemms(program, gate_up_gemm(problem), places, {"gate", "up"});
  append_act_mul(program, problem, facts, places, "gate", "up");
  append_down(program, problem, facts, places);
  return baseline;
}

/// Gate and up as one product with their weights stacked, which needs a copy of the weights. It
/// saves that product, packed, for a backward pass.
Baseline merged(const Problem& problem, const DeviceFacts& facts) {
  const auto [m, d, h] = shape_of(problem);
  const bool quantised = is_quantised(problem);
  const double by_d = 1 / std::sqrt(static_cast<double>(d));
  Baseline baseline;
  baseline.name = "merged";
  baseline.summary = "cuBLASLt: gate and up as one product, an act * mul kernel, and down";
  baseline.extra = {{"w_gate_up", problem.dtype, {2 * h, d}, Role::input, quantised ? 16 : by_d},
                    {"gate_up", wide_dtype(problem), {m, 2 * h}, Role::intermediate, 1}};
  if (quantised)
    baseline.extra.push_back({"w_gate_up_scale", DType::f32, {1}, Role::input, 0, by_d / 16});
  append_norm(baseline, problem, facts);
  const TensorPlaces places(ffn_op().tensors(problem), baseline.extra);
  Program& program = baseline.program;
  GemmProblem gate_up = gate_up_gemm(problem);
  gate_up.form = GemmForm::single;
  gate_up.n = 2 * h;
  gate_up.b = {{"w_gate_up"}};
  if (quantised) gate_up.quantisation.b_scale = {"w_gate_up_scale"};
  append_library_gemms(program, gate_up, places, {"gate_up"});
  append_act_mul(program, problem, facts, places, "gate_up", "");
  append_down(program, problem, facts, places);
  return baseline;
}

Baseline backward(const Problem& problem, const DeviceFacts& facts) {
  Baseline baseline;
  baseline.name = "unfused";
  baseline.summary =
      facts.kind == DeviceKind::cpu
          ? "a product of OpenBLAS each and the vectorised gradients of gate and up"
          : "a product of cuBLASLt each and a kernel for the gradients of gate and up";
  baseline.extra = gradient_extra(problem);
  const TensorPlaces places(ffn_op().tensors(problem), baseline.extra);
  Program& program = baseline.program;
  program.host_tensors = places.count();
  // hidden follows from gate and up with their gradients.
  if (recomputes(problem))
    append_library_gemms(program, gate_up_gemm(problem), places, {"gate", "up"});
  append_library_gemms(program, d_hidden_gemm(problem), places, {"dc"});
  append_gate_gradient(program, problem, facts, places, "gate", "up");
  append_library_gemms(program, d_x_gemm(problem), places);
  if (is_frozen(problem)) return baseline;
  for (const GemmProblem& gemm : {d_gate_up_gemm(problem), d_down_gemm(problem)})
    append_library_gemms(program, gemm, places);
  return baseline;
}

}  // namespace

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) {
  if (problem.pass == "bwd") return {backward(problem, facts)};
  if (has_block_scales(problem)) return {};  // the libraries' take them in an order of their own
  if (facts.kind == DeviceKind::cpu && is_quantised(problem)) return {};
  if (facts.kind == DeviceKind::cpu) return {unfused(problem, facts)};
  return {unfused(problem, facts), merged(problem, facts)};
}

void append_act_mul(Program& program, const Problem& problem, const DeviceFacts& facts,
                    const TensorPlaces& places, std::string_view gate, std::string_view up) {
  if (facts.kind == DeviceKind::cpu) {
    return append_host_rows(
        program, problem, facts,
        [=, gate_at = places.at(gate), up_at = places.at(up), hidden = places.at("hidden")](
            const RowKernels& kernels, Activation activation, const auto& of, std::size_t columns) {
          kernels.act_mul(activation, of(gate_at), of(up_at), of(hidden), columns, false);
        });
  }
  const auto [m, d, h] = shape_of(problem);
  const DType wide = wide_dtype(problem);
  const std::string activation = activation_type(parse_activation(problem.option("act")));
  std::vector<Argument> arguments{tensor_of(places, gate), tensor_or_null(places.at(up)),
                                  tensor_of(places, "hidden")};
  if (is_quantised(problem)) arguments.emplace_back(tensor_of(places, "hidden_scale"));
  append_rows(program,
              is_quantised(problem)
                  ? fmt::format("act_mul_fp8<{}>", activation)
                  : fmt::format("act_mul<{}, {}>", element_type(wide), activation),
              wide, m, h, std::move(arguments));
}

std::vector<TensorSpec> gradient_extra(const Problem& problem) {
  const std::vector<std::int64_t> shape{problem.size("m"), problem.size("h")};
  std::vector<TensorSpec> extra{{"dc", problem.dtype, shape, Role::intermediate, 1}};
  if (is_frozen(problem) && !recomputes(problem))
    extra.push_back({"hidden", problem.dtype, shape, Role::intermediate, 1});
  return extra;
}

void append_gate_gradient(Program& program, const Problem& problem, const DeviceFacts& facts,
                          const TensorPlaces& places, std::string_view gate, std::string_view up) {
  const auto [m, d, h] = shape_of(problem);
  const auto activation = parse_activation(problem.option("act"));
  if (facts.kind == DeviceKind::cuda) {
    const std::int64_t elements = m * h;
    const auto vector = static_cast<std::int64_t>(16 / dtype_bytes(problem.dtype));
    const std::int64_t count = elements % vector == 0 ? vector : 1;
    std::vector<Argument> arguments;
    for (const std::string_view name :
         {std::string_view("dc"), gate, up, std::string_view("d_gate"), std::string_view("d_up"),
          std::string_view("hidden")})
      arguments.emplace_back(tensor_of(places, name));
    arguments.emplace_back(elements);
    append_kernel(program, kernel_file,
                  fmt::format("gate_gradient<{}, {}, {}>", element_type(problem.dtype),
                              activation_type(activation), count),
                  {static_cast<std::uint32_t>(ceil_div(elements, 256 * count))}, 256,
                  std::move(arguments));
    return;
  }
  append_host_rows(
      program, problem, facts,
      [=, dc = places.at("dc"), gate_at = places.at(gate), up_at = places.at(up),
       d_gate = places.at("d_gate"), d_up = places.at("d_up"), hidden = places.at("hidden")](
          const RowKernels& kernels, Activation act, const auto& of, std::size_t columns) {
        kernels.act_mul_gradient(act, of(gate_at), of(up_at), of(dc), of(d_gate), of(d_up), columns,
                                 false);
        kernels.act_mul(act, of(gate_at), of(up_at), of(hidden), columns, false);
      });
}

}  // namespace fftune::ffn
