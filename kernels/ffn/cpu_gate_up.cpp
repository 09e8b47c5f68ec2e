// gate, up and hidden computed again from x on the CPU, for a backward pass.
#include <cstddef>
#include <iterator>

#include "kernels/common/cpu_rows.hpp"
#include "kernels/ffn/backward.hpp"
#include "kernels/gemm/product_families.hpp"

namespace fftune::ffn {
namespace {

Product product_of_x(const Problem& problem, std::size_t weights, std::size_t out) {
  const Shape shape = shape_of(problem);
  Product product;
  product.shape = {.m = shape.m, .n = shape.h, .k = shape.d};
  product.dtype = problem.dtype;
  product.a = {TensorArgument{places_of(problem).x}};
  product.b = {TensorArgument{weights}};
  product.c = {TensorArgument{out}};
  return product;
}

Product gate_product(const Problem& problem) {
  const Places at = places_of(problem);
  return product_of_x(problem, at.w_gate, at.gate);
}
Product up_product(const Problem& problem) {
  const Places at = places_of(problem);
  return product_of_x(problem, at.w_up, at.up);
}

/// hidden = act(gate) ⊙ up, by rows.
HostFunction gated_rows(const Problem& problem, const DeviceFacts& facts) {
  const Shape shape = shape_of(problem);
  const Places at = places_of(problem);
  const RowKernels* const loops = &row_kernels(facts.arch, problem.dtype);
  const auto activation = parse_activation(problem.option("act"));
  return [=, bytes = dtype_bytes(problem.dtype)](const HostCall& call) {
    call.parallel.run(static_cast<int>(shape.m), call.parallel.max_threads(), [&](int row) {
      const auto of = [&](std::size_t place) {
        return static_cast<std::byte*>(call.tensors[place]) +
               static_cast<std::size_t>(row) * static_cast<std::size_t>(shape.h) * bytes;
      };
      loops->act_mul(activation, of(at.gate), of(at.up), of(at.hidden),
                     static_cast<std::size_t>(shape.h), false);
    });
  };
}

template <typename Products>
class CpuGateUp final : public Family {
 public:
  explicit CpuGateUp(std::string_view name) : name_(name) {}
  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return "gate and up again, then their activation"; }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  bool is_fallback() const override { return gate_.is_fallback(); }
  std::vector<std::string> stages() const override { return {stage_gate_up}; }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    if (!recomputes(problem)) return "it computes gate and up again: the pass bwd with save=input";
    return std::nullopt;
  }
  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return gate_.space(problem, facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return gate_.default_config(problem, facts);
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    // Both products have the same shape, and so the same scratch memory, one after the other.
    Program program = gate_.program(problem, facts, config);
    Program up = up_.program(problem, facts, config);
    std::move(up.steps.begin(), up.steps.end(), std::back_inserter(program.steps));
    program.steps.emplace_back(gated_rows(problem, facts));
    program.host_tensors = places_of(problem).count;
    return program;
  }

  std::vector<std::string> sources() const override {
    auto sources = gate_.sources();
    sources.emplace_back("ffn/cpu_gate_up.cpp");
    return sources;
  }

 private:
  std::string_view name_;
  Products gate_{{stage_gate_up, "bwd", gate_product}, "gate"};
  Products up_{{stage_gate_up, "bwd", up_product}, "up"};
};

}  // namespace

const Family& cpu_gate_up_blas_family() {
  static const CpuGateUp<CpuBlasProduct> family("cpu_gate_up_blas");
  return family;
}
const Family& cpu_gate_up_plain_family() {
  static const CpuGateUp<CpuPlainProduct> family("cpu_gate_up_plain");
  return family;
}

}  // namespace fftune::ffn
