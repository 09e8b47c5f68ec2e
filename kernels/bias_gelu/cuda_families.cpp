// A thread works on fixed columns. The fallbacks are the same kernels with accesses of one element.
#include <fmt/format.h>

#include "kernels/bias_gelu/bias_gelu.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/column_family.hpp"
#include "kernels/common/cuda_kernel.hpp"

namespace fftune::bias_gelu {
namespace {

constexpr const char* forward_file = "bias_gelu/forward_columns.cu";
constexpr const char* backward_file = "bias_gelu/backward_columns.cu";

std::string kernel_name(const Problem& problem, const char* name, const Config& config) {
  return fmt::format("fftune::{}<{}, {}, {}, {}, {}>", name, element_type(problem.dtype),
                     element_type(bias_dtype(problem)),
                     activation_type(parse_activation(problem.option("act"))), saves_input(problem),
                     column_template_arguments(config));
}

class Forward final : public ColumnFamily {
 public:
  Forward(std::string_view name, std::string_view summary, bool fallback)
      : ColumnFamily({.name = name,
                      .summary = summary,
                      .stage = stage_forward,
                      .pass = "fwd",
                      .sources = {forward_file},
                      .is_fallback = fallback}) {}

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& given) const override {
    const ColumnWork work = this->work(problem);
    const Config config = resolved(work, facts, given);
    const Places at = places_of(problem);
    Program program;
    program.kernels.push_back({forward_file, kernel_name(problem, "forward_columns", config)});
    program.steps.emplace_back(column_launch(work, facts, config,
                                             {TensorArgument{at.x}, TensorArgument{at.bias},
                                              TensorArgument{at.y}, tensor_or_null(at.input)}));
    return program;
  }

 protected:
  ColumnWork work(const Problem& problem) const override {
    return {problem.size("m"), problem.size("h"), problem.dtype, saves_input(problem) ? 3 : 2,
            false};
  }
};

class Backward final : public ColumnFamily {
 public:
  Backward(std::string_view name, std::string_view summary, bool fallback)
      : ColumnFamily({.name = name,
                      .summary = summary,
                      .stage = stage_backward,
                      .pass = "bwd",
                      .sources = {backward_file},
                      .is_fallback = fallback}) {}

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& given) const override {
    const ColumnWork work = this->work(problem);
    const Config config = resolved(work, facts, given);
    const Places at = places_of(problem);
    const std::int64_t partial_rows = row_blocks(work, facts, config);
    Program program;
    program.scratch = {{static_cast<std::size_t>(partial_rows * work.h) * sizeof(float), false}};
    program.kernels.push_back({backward_file, kernel_name(problem, "backward_columns", config)});
    program.steps.emplace_back(column_launch(
        work, facts, config,
        {TensorArgument{saves_input(problem) ? at.input : at.x}, tensor_or_null(at.bias),
         TensorArgument{at.dy}, TensorArgument{at.dx}, ScratchArgument{0}}));
    append_column_sum(program, facts, backward_file, "backward_columns_bias", bias_dtype(problem),
                      ScratchArgument{0}, TensorArgument{at.dbias}, partial_rows, work.h);
    return program;
  }

 protected:
  ColumnWork work(const Problem& problem) const override {
    return {problem.size("m"), problem.size("h"), problem.dtype, 3, true};
  }
};

}  // namespace

std::vector<const Family*> cuda_families() {
  static constexpr const char* by_element = "element by element: the fallback";
  static const Forward forward("forward_columns", "16 bytes of several rows in flight a thread",
                               false);
  static const Backward backward("backward_columns",
                                 "columns stay with a thread, which sums dbias on the way", false);
  static const Forward forward_fallback("forward_fallback", by_element, true);
  static const Backward backward_fallback("backward_fallback", by_element, true);
  return {&forward, &backward, &forward_fallback, &backward_fallback};
}

}  // namespace fftune::bias_gelu
