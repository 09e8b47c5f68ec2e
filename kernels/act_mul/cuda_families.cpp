// A thread works on fixed columns. The fallbacks are the same kernels with accesses of one element.
#include <fmt/format.h>

#include "kernels/act_mul/act_mul.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/column_family.hpp"

namespace fftune::act_mul {
namespace {

class Columns final : public ColumnFamily {
 public:
  Columns(std::string_view name, std::string_view summary, bool backward, bool fallback)
      : ColumnFamily(
            {.name = name,
             .summary = summary,
             .stage = backward ? stage_backward : stage_forward,
             .pass = backward ? "bwd" : "fwd",
             .sources = {backward ? "act_mul/backward_columns.cu" : "act_mul/forward_columns.cu"},
             .is_fallback = fallback},
            backward ? "backward_columns" : "forward_columns"),
        backward_(backward) {}

 protected:
  ColumnWork work(const Problem& problem) const override {
    return {problem.size("m"), problem.size("h"), problem.dtype, backward_ ? 5 : 3, false};
  }
  ColumnKernel kernel(const Problem& problem) const override {
    const TensorPlaces at(act_mul_op().tensors(problem));
    ColumnKernel kernel{
        .types =
            fmt::format("{}, {}, {}", element_type(problem.dtype),
                        activation_type(parse_activation(problem.option("act"))), packed(problem)),
        .arguments = {}};
    const auto parts = backward_ ? std::vector<const char*>{"gate", "up", "dout", "dgate", "dup"}
                                 : std::vector<const char*>{"gate", "up", "out"};
    for (const char* part : parts)
      kernel.arguments.emplace_back(tensor_of(at, tensor_with(problem, part)));
    return kernel;
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
