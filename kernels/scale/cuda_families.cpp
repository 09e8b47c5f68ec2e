// A thread works on fixed columns. The fallback is the same kernel with accesses of one element.
#include "kernels/common/column_family.hpp"
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

}  // namespace

std::vector<const Family*> cuda_families() {
  const auto family = [](const char* name, std::string_view summary, bool is_fallback) {
    return ColumnFamily({.name = name,
                         .summary = summary,
                         .pass = "fwd",
                         .sources = {"scale/forward_columns.cu"},
                         .is_fallback = is_fallback},
                        {work, kernel});
  };
  static const ColumnFamily columns = family("forward_columns", in_flight_summary, false),
                            fallback = family("forward_fallback",
                                              "element by element: the fallback", true);
  return {&columns, &fallback};
}

}  // namespace fftune::scale
