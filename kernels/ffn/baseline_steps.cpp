#include "kernels/ffn/baseline_steps.hpp"

#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "kernels/common/activation.hpp"
#include "kernels/common/device_types.hpp"
#include "kernels/common/kernel_step.hpp"
#include "kernels/ffn/cuda_stage.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {
namespace {

/// Adds a kernel over [rows, columns], 16 bytes a thread.
void append_rows(Program& program, const char* file, const std::string& expression, DType dtype,
                 std::int64_t rows, std::int64_t columns, std::vector<Argument> arguments) {
  constexpr std::uint32_t threads = 256;
  const auto elements = static_cast<std::int64_t>(16 / dtype_bytes(dtype));
  append_kernel(program, file, expression, grid_of_matrix(rows, columns, elements * threads),
                threads, std::move(arguments));
}

Argument or_null(bool present, std::size_t place) {
  return present ? Argument{TensorArgument{place}} : Argument{std::int64_t{0}};
}

}  // namespace

void append_silu_mul(Program& program, const Problem& problem, const Pointer& gate,
                     const std::optional<Pointer>& up, const Pointer& out) {
  const Shape shape = shape_of(problem);
  const DType wide = wide_dtype(problem);
  std::string kernel = fmt::format("silu_mul<{}, {}>", element_type(wide),
                                   activation_type(parse_activation(problem.option("act"))));
  std::vector<Argument> arguments{
      argument_of(gate), up ? argument_of(*up) : Argument{std::int64_t{0}}, argument_of(out)};
  if (is_quantised(problem)) {
    kernel =
        fmt::format("silu_mul_fp8<{}>", activation_type(parse_activation(problem.option("act"))));
    arguments.emplace_back(TensorArgument{places_of(problem).hidden_scale});
  }
  arguments.insert(arguments.end(), {shape.m, shape.h});
  append_rows(program, "ffn/silu_mul.cu", kernel, wide, shape.m, shape.h, std::move(arguments));
}

void append_add_rows(Program& program, const Problem& problem) {
  const Form form = form_of(problem);
  if (!form.adds()) return;
  const Shape shape = shape_of(problem);
  const Places at = places_of(problem);
  const DType wide = wide_dtype(problem);
  append_rows(program, "ffn/add_rows.cu", fmt::format("add_rows<{}>", element_type(wide)), wide,
              shape.m, shape.d,
              {TensorArgument{at.y}, or_null(form.bias, at.b_down),
               or_null(form.residual, at.residual), shape.m, shape.d});
}

}  // namespace fftune::ffn
