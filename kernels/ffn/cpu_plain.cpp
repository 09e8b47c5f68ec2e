// The CPU's fallback: plain loops over any sizes and types.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <utility>

#include "kernels/common/activation.hpp"
#include "kernels/ffn/backward.hpp"
#include "kernels/ffn/cpu_row_product.hpp"
#include "kernels/ffn/cpu_work.hpp"
#include "kernels/ffn/families.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {
namespace {

/// The value of the scale of a whole tensor; 1 of a problem that has none.
float scale_of(const HostCall& call, std::size_t place) {
  return place == Places::none ? 1.0f : *static_cast<const float*>(call.tensors[place]);
}

/// The operand of a problem at these places, with its scales if it is quantised.
Operand operand(const Problem& problem, const HostCall& call, std::size_t elements,
                std::size_t scales, std::int64_t block_rows) {
  if (!is_quantised(problem)) return {call.tensors[elements]};
  const auto* values = static_cast<const float*>(call.tensors[scales]);
  if (!has_block_scales(problem)) return {call.tensors[elements], values};
  return {call.tensors[elements], values, static_cast<std::size_t>(block_rows)};
}

/// Fills out [tokens, rows] of `dtype` with value(token, row), some rows of weights a task.
template <typename Value>
void fill(const HostCall& call, DType dtype, void* out, std::size_t tokens, std::size_t rows,
          const Value& value) {
  constexpr std::size_t block = 8;
  const auto tasks = static_cast<int>((rows + block - 1) / block);
  call.parallel.run(tasks, call.parallel.max_threads(), [&](int task) {
    const std::size_t first = static_cast<std::size_t>(task) * block;
    const std::size_t count = std::min(block, rows - first);
    for (std::size_t token = 0; token < tokens; ++token) {
      float values[block];
      for (std::size_t i = 0; i < count; ++i) values[i] = value(token, first + i);
      auto* place = static_cast<std::byte*>(out) + (token * rows + first) * dtype_bytes(dtype);
      encode(dtype, {values, count}, place);
    }
  });
}

/// The same in fp8, with a scale for each 128 elements of a row of out, which goes to `scales`.
template <typename Value>
void fill_quantised(const HostCall& call, void* out, float* scales, std::size_t tokens,
                    std::size_t rows, const Value& value) {
  constexpr auto block = static_cast<std::size_t>(scale_block);
  constexpr float largest_number = 448, least = 0x1p-100f;  // below it quotients overflow
  const std::size_t blocks = (rows + block - 1) / block;
  call.parallel.run(static_cast<int>(blocks), call.parallel.max_threads(), [&](int task) {
    const std::size_t first = static_cast<std::size_t>(task) * block;
    const std::size_t count = std::min(block, rows - first);
    for (std::size_t token = 0; token < tokens; ++token) {
      float values[block], largest = 0;
      for (std::size_t i = 0; i < count; ++i) {
        values[i] = value(token, first + i);
        largest = std::max(largest, std::abs(values[i]));
      }
      const float scale = largest > least ? largest / largest_number : 1;
      for (std::size_t i = 0; i < count; ++i) values[i] /= scale;
      scales[token * blocks + static_cast<std::size_t>(task)] = scale;
      encode(DType::fp8, {values, count}, static_cast<std::byte*>(out) + token * rows + first);
    }
  });
}

/// The forward pass, or gate_up alone, where a backward pass computes gate and up again.
class CpuPlain final : public Family {
 public:
  explicit CpuPlain(bool gate_up_alone) : alone_(gate_up_alone) {}
  std::string_view name() const override { return alone_ ? "cpu_gate_up_plain" : "cpu_plain"; }
  std::string_view summary() const override { return "plain loops for any sizes: the fallback"; }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  std::vector<std::string> stages() const override {
    return alone_ ? std::vector<std::string>{stage_gate_up}
                  : std::vector<std::string>{stage_gate_up, stage_down};
  }
  bool is_fallback() const override { return true; }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    if (alone_ && !recomputes(problem)) return recomputing_alone;
    if (!alone_ && problem.pass != "fwd") return forward_alone;
    return std::nullopt;
  }
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }

  Program program(const Problem& problem, const DeviceFacts&, const Config&) const override {
    const Shape shape = shape_of(problem);
    const auto m = static_cast<std::size_t>(shape.m);
    const auto d = static_cast<std::size_t>(shape.d);
    const auto h = static_cast<std::size_t>(shape.h);
    const auto dtype = problem.dtype, wide = wide_dtype(problem);
    const auto activation = parse_activation(problem.option("act"));
    Program program;
    const Form form = form_of(problem);
    const Places at = places_of(problem);
    program.host_tensors = at.count;
    program.steps.emplace_back(HostFunction([=](const HostCall& call) {
      const Operand x = operand(problem, call, at.gate_up_x, at.x_scale, 1);
      const RowProduct gate(dtype, x,
                            operand(problem, call, at.w_gate, at.w_gate_scale, scale_block), d);
      const RowProduct up(dtype, x, operand(problem, call, at.w_up, at.w_up_scale, scale_block), d);
      const auto hidden = [&](auto token, auto row) {
        return static_cast<float>(activate(activation, gate.at(token, row))) * up.at(token, row);
      };
      if (has_block_scales(problem)) {
        fill_quantised(call, call.tensors[at.hidden],
                       static_cast<float*>(call.tensors[at.hidden_scale]), m, h, hidden);
      } else {
        const float scale = scale_of(call, at.hidden_scale);
        fill(call, dtype, call.tensors[at.hidden], m, h,
             [&](auto token, auto row) { return hidden(token, row) / scale; });
      }
      if (!form.saves) return;
      for (const auto& [product, place] : {std::pair{&gate, at.gate}, {&up, at.up}})
        fill(call, wide, call.tensors[place], m, h,
             [product = product](auto token, auto row) { return product->at(token, row); });
    }));
    if (alone_) return program;
    program.steps.emplace_back(HostFunction([=](const HostCall& call) {
      const RowProduct down(dtype, operand(problem, call, at.hidden, at.hidden_scale, 1),
                            operand(problem, call, at.w_down, at.w_down_scale, scale_block), h);
      const auto added = [&](bool adds, std::size_t place, std::size_t index) {
        float value = 0;
        if (adds)
          decode(wide,
                 static_cast<const std::byte*>(call.tensors[place]) + index * dtype_bytes(wide),
                 {&value, 1});
        return value;
      };
      fill(call, wide, call.tensors[at.y], m, d, [&](auto token, auto row) {
        return down.at(token, row) + added(form.bias, at.b_down, row) +
               added(form.residual, at.residual, token * d + row);
      });
    }));
    return program;
  }

  std::vector<std::string> sources() const override { return {"ffn/cpu_plain.cpp"}; }

 private:
  bool alone_;
};

}  // namespace

const Family& cpu_plain_family() {
  static const CpuPlain family(false);
  return family;
}
const Family& cpu_gate_up_plain_family() {
  static const CpuPlain family(true);
  return family;
}

}  // namespace fftune::ffn
