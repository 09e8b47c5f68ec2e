// A thread works on fixed columns. The fallback is the same kernel with accesses of one element.
// Factors of rows and of elements have a kernel of their own, a thread an element.
#include <fmt/format.h>

#include "kernels/common/column_family.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/scale/scale.hpp"

namespace fftune::scale {
namespace {

ColumnWork work(const Problem& problem) {
  return {problem.size("m"), problem.size("h"), problem.dtype, 2, false};
}

ColumnKernel kernel(const Problem& problem) {
  return {.types = std::string(element_type(problem.dtype)),
          .arguments = {TensorArgument{0}, TensorArgument{1},
                        TensorArgument{is_in_place(problem) ? 0U : 2U}}};
}

std::optional<std::string> refuse_several(const Problem& problem, const DeviceFacts&) {
  if (factors_of(problem) == Factors::one) return std::nullopt;
  return "the kernel has one factor";
}

Program factors_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  constexpr std::int64_t of_block = 256;
  const TensorPlaces places(scale_op().tensors(problem));
  const std::int64_t h = problem.size("h"), elements = problem.size("m") * h;
  const bool by_ids = factors_of(problem) == Factors::ids;
  std::vector<Argument> arguments{TensorArgument{0},
                                  TensorArgument{1},
                                  tensor_or_null(places.at("ids")),
                                  TensorArgument{is_in_place(problem) ? 0U : places.at("y")},
                                  elements,
                                  h};
  arguments.emplace_back(by_ids ? static_cast<std::int32_t>(problem.size("factors")) : 0);
  return pdl_program(facts, "scale/factors.cu",
                     fmt::format("scale_by_factors<{}, {}>", element_type(problem.dtype), by_ids),
                     {static_cast<std::uint32_t>(quotient_up(elements, of_block))}, of_block,
                     std::move(arguments));
}

ColumnFamily column_family(const char* name, std::string_view summary, bool is_fallback) {
  return ColumnFamily({.name = name,
                       .summary = summary,
                       .sources = {"scale/forward_columns.cu"},
                       .is_fallback = is_fallback,
                       .refusal = refuse_several},
                      {work, kernel});
}

Program fallback_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  static const ColumnFamily one = column_family("forward_fallback", "", true);
  return factors_of(problem) == Factors::one ? one.program(problem, facts, config)
                                             : factors_program(problem, facts, config);
}

}  // namespace

std::vector<const Family*> cuda_families() {
  static const ColumnFamily columns = column_family("forward_columns", in_flight_summary, false);
  static const StageFamily fallback({.name = "forward_fallback",
                                     .summary = "element by element: the fallback",
                                     .sources = {"scale/forward_columns.cu", "scale/factors.cu"},
                                     .is_fallback = true,
                                     .program = fallback_program});
  return {&columns, &fallback};
}

}  // namespace fftune::scale
