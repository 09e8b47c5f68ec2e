// A thread works on fixed columns. The fallbacks are the same kernels with accesses of one element.
#include <fmt/format.h>

#include <utility>

#include "kernels/act_mul/act_mul.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/column_family.hpp"
#include "kernels/common/cuda_kernel.hpp"

namespace fftune::act_mul {
namespace {

constexpr const char* forward_file = "act_mul/forward_columns.cu";
constexpr const char* backward_file = "act_mul/backward_columns.cu";

class Columns final : public ColumnFamily {
 public:
  Columns(std::string_view name, std::string_view summary, bool backward, bool fallback)
      : ColumnFamily({.name = name,
                      .summary = summary,
                      .stage = backward ? stage_backward : stage_forward,
                      .pass = backward ? "bwd" : "fwd",
                      .sources = {backward ? backward_file : forward_file},
                      .is_fallback = fallback}),
        backward_(backward) {}

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& given) const override {
    const ColumnWork work = this->work(problem);
    const Config config = resolved(work, facts, given);
    const Places at = places_of(problem);
    std::vector<Argument> arguments{TensorArgument{at.gate}, TensorArgument{at.up}};
    if (backward_)
      arguments.insert(arguments.end(),
                       {TensorArgument{at.dout}, TensorArgument{at.dgate}, TensorArgument{at.dup}});
    else
      arguments.emplace_back(TensorArgument{at.out});
    Program program;
    program.kernels.push_back({backward_ ? backward_file : forward_file,
                               fmt::format("fftune::{}<{}, {}, {}, {}>",
                                           backward_ ? "backward_columns" : "forward_columns",
                                           element_type(problem.dtype),
                                           activation_type(parse_activation(problem.option("act"))),
                                           packed(problem), column_template_arguments(config))});
    program.steps.emplace_back(column_launch(work, facts, config, std::move(arguments)));
    return program;
  }

 protected:
  ColumnWork work(const Problem& problem) const override {
    return {problem.size("m"), problem.size("h"), problem.dtype, backward_ ? 5 : 3, false};
  }

 private:
  bool backward_;
};

}  // namespace

std::vector<const Family*> cuda_families() {
  static constexpr const char* in_flight = "16 bytes of several rows in flight a thread";
  static constexpr const char* by_element = "element by element: the fallback";
  static const Columns forward("forward_columns", in_flight, false, false);
  static const Columns backward("backward_columns", in_flight, true, false);
  static const Columns forward_fallback("forward_fallback", by_element, false, true);
  static const Columns backward_fallback("backward_fallback", by_element, true, true);
  return {&forward, &backward, &forward_fallback, &backward_fallback};
}

}  // namespace fftune::act_mul
