// What a user would write without fftune: a product of the library for each of the formula, and a
// kernel for what is between.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "kernels/common/activation.hpp"
#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/device_types.hpp"
#include "kernels/ffn/backward.hpp"
#include "kernels/ffn/baseline_steps.hpp"
#include "kernels/gemm/library_product.hpp"

namespace fftune::ffn {
namespace {

/// What is between the products on the CPU, by rows.
HostFunction gradient_rows(const Problem& problem, const DeviceFacts& facts) {
  const Shape shape = shape_of(problem);
  const Places at = places_of(problem);
  const RowKernels* const loops = &row_kernels(facts.arch, problem.dtype);
  const auto activation = parse_activation(problem.option("act"));
  return [=, bytes = dtype_bytes(problem.dtype)](const HostCall& call) {
    const auto h = static_cast<std::size_t>(shape.h);
    call.parallel.run(static_cast<int>(shape.m), call.parallel.max_threads(), [&](int row) {
      const auto of = [&](std::size_t place) {
        return static_cast<std::byte*>(call.tensors[place]) +
               static_cast<std::size_t>(row) * h * bytes;
      };
      loops->act_mul_gradient(activation, of(at.gate), of(at.up), of(at.count), of(at.d_gate),
                              of(at.d_up), h, false);
      loops->act_mul(activation, of(at.gate), of(at.up), of(at.hidden), h, false);
    });
  };
}

/// The same on CUDA, in one launch.
void append_gate_gradient(Program& program, const Problem& problem) {
  const Shape shape = shape_of(problem);
  const Places at = places_of(problem);
  const std::int64_t elements = shape.m * shape.h;
  const auto vector = static_cast<std::int64_t>(16 / dtype_bytes(problem.dtype));
  const std::int64_t count = elements % vector == 0 ? vector : 1;
  program.kernels.push_back(
      {"ffn/gate_gradient.cu",
       fmt::format("fftune::gate_gradient<{}, {}, {}>", fftune::element_type(problem.dtype),
                   activation_type(parse_activation(problem.option("act"))), count)});
  KernelLaunch launch;
  launch.kernel = program.kernels.size() - 1;
  launch.grid.x = static_cast<std::uint32_t>(ceil_div(elements, 256 * count));
  launch.block.x = 256;
  launch.arguments = {TensorArgument{at.count},
                      TensorArgument{at.gate},
                      TensorArgument{at.up},
                      TensorArgument{at.d_gate},
                      TensorArgument{at.d_up},
                      TensorArgument{at.hidden},
                      elements};
  program.steps.emplace_back(std::move(launch));
}

/// gate and up = x · weightsᵀ by the library; hidden follows from them with their gradients.
void append_recomputation(Program& program, const Problem& problem) {
  const Shape shape = shape_of(problem);
  const Places at = places_of(problem);
  for (const auto& [weights, out] : {std::pair{at.w_gate, at.gate}, {at.w_up, at.up}})
    program.steps.emplace_back(LibraryGemm{.dtype = problem.dtype,
                                           .m = shape.m,
                                           .n = shape.h,
                                           .k = shape.d,
                                           .a = TensorArgument{at.x},
                                           .b = TensorArgument{weights},
                                           .c = TensorArgument{out}});
}

}  // namespace

std::vector<Baseline> backward_baselines(const Problem& problem, const DeviceFacts& facts) {
  const Shape shape = shape_of(problem);
  const Places at = places_of(problem);
  Baseline baseline;
  baseline.name = "unfused";
  baseline.extra = {{"dc", problem.dtype, {shape.m, shape.h}, Role::intermediate, 1}};
  Program& program = baseline.program;
  program.host_tensors = at.count + 1;
  if (recomputes(problem)) append_recomputation(program, problem);
  append_library_product(program, d_hidden_product(problem), TensorArgument{at.count});
  if (facts.kind == DeviceKind::cpu) {
    baseline.summary = "a product of OpenBLAS each and the vectorised gradients of gate and up";
    program.steps.emplace_back(gradient_rows(problem, facts));
  } else {
    baseline.summary = "a product of cuBLASLt each and a kernel for the gradients of gate and up";
    append_gate_gradient(program, problem);
  }
  for (const Product& product :
       {d_x_product(problem), d_gate_up_product(problem), d_down_product(problem)})
    append_library_product(program, product);
  return {baseline};
}

}  // namespace fftune::ffn
