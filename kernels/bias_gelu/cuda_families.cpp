// A thread works on fixed columns. The fallbacks are the same kernels with accesses of one element.
#include <fmt/format.h>

#include "kernels/bias_gelu/bias_gelu.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/column_family.hpp"

namespace fftune::bias_gelu {
namespace {

class Columns final : public ColumnFamily {
 public:
  Columns(std::string_view name, std::string_view summary, bool backward, bool fallback)
      : ColumnFamily({.name = name,
                      .summary = summary,
                      .stage = backward ? stage_backward : stage_forward,
                      .pass = backward ? "bwd" : "fwd",
                      .sources = {backward ? "bias_gelu/backward_columns.cu"
                                           : "bias_gelu/forward_columns.cu"},
                      .is_fallback = fallback},
                     backward ? "backward_columns" : "forward_columns"),
        backward_(backward) {}

 protected:
  ColumnWork work(const Problem& problem) const override {
    return {problem.size("m"), problem.size("h"), problem.dtype,
            backward_ || saves_input(problem) ? 3 : 2, backward_};
  }
  ColumnKernel kernel(const Problem& problem) const override {
    const TensorPlaces at(bias_gelu_op().tensors(problem));
    const bool saves = saves_input(problem);
    const std::string types = fmt::format(
        "{}, {}, {}, {}", element_type(problem.dtype), element_type(bias_dtype(problem)),
        activation_type(parse_activation(problem.option("act"))), saves);
    if (!backward_)
      return {.types = types,
              .arguments = {tensor_of(at, "x"), tensor_of(at, "bias"), tensor_of(at, "y"),
                            tensor_or_null(at, "input")}};
    return {.types = types,
            .arguments = {tensor_of(at, saves ? "input" : "x"), tensor_or_null(at, "bias"),
                          tensor_of(at, "dy"), tensor_of(at, "dx")},
            .sum_name = "backward_columns_bias",
            .sum_dtype = bias_dtype(problem),
            .sum = tensor_of(at, "dbias")};
  }

 private:
  bool backward_;
};

}  // namespace

std::vector<const Family*> cuda_families() {
  static constexpr const char* in_flight = "16 bytes of several rows in flight a thread";
  static constexpr const char* summed = "columns stay with a thread, which sums dbias on the way";
  static constexpr const char* by_element = "element by element: the fallback";
  static const Columns forward("forward_columns", in_flight, false, false);
  static const Columns backward("backward_columns", summed, true, false);
  static const Columns forward_fallback("forward_fallback", by_element, false, true);
  static const Columns backward_fallback("backward_fallback", by_element, true, true);
  return {&forward, &backward, &forward_fallback, &backward_fallback};
}

}  // namespace fftune::bias_gelu
