// The CPU's fallback: plain loops over any sizes and types.
#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

#include "kernels/common/activation.hpp"
#include "kernels/ffn/backward.hpp"
#include "kernels/ffn/cpu_work.hpp"
#include "kernels/ffn/families.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {
namespace {

constexpr std::size_t chunk = 256;  // of a row, in float on the stack
constexpr std::size_t lanes = 8;    // partial sums, which a compiler may keep in vectors

/// The products of rows of `x` [tokens, depth] and `w` [rows, depth], both of `dtype`.
class RowProduct {
 public:
  RowProduct(DType dtype, const void* x, const void* w, std::size_t depth, float scale)
      : dtype_(dtype), x_(x), w_(w), depth_(depth), scale_(scale) {}

  /// Row `token` of x times row `row` of w, summed in fp32 in a fixed order.
  float at(std::size_t token, std::size_t row) const {
    float partial[lanes] = {};
    float a[chunk], b[chunk];
    for (std::size_t k = 0; k < depth_; k += chunk) {
      const std::size_t count = std::min(chunk, depth_ - k);
      widen(x_, token * depth_ + k, {a, count});
      widen(w_, row * depth_ + k, {b, count});
      for (std::size_t i = 0; i < count; ++i) partial[i % lanes] += a[i] * b[i];
    }
    float sum = 0;
    for (const float part : partial) sum += part;
    return sum * scale_;
  }

 private:
  void widen(const void* from, std::size_t at, std::span<float> to) const {
    decode(dtype_, static_cast<const std::byte*>(from) + at * dtype_bytes(dtype_), to);
  }

  DType dtype_;
  const void* x_;
  const void* w_;
  std::size_t depth_;
  float scale_;
};

/// The value of a scale; 1 of a problem that has none.
float scale_of(const HostCall& call, std::size_t place) {
  return place == Places::none ? 1.0f : *static_cast<const float*>(call.tensors[place]);
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
      const float x_scale = scale_of(call, at.x_scale), out = scale_of(call, at.hidden_scale);
      const RowProduct gate(dtype, call.tensors[at.gate_up_x], call.tensors[at.w_gate], d,
                            x_scale * scale_of(call, at.w_gate_scale));
      const RowProduct up(dtype, call.tensors[at.gate_up_x], call.tensors[at.w_up], d,
                          x_scale * scale_of(call, at.w_up_scale));
      fill(call, dtype, call.tensors[at.hidden], m, h, [&](auto token, auto row) {
        return static_cast<float>(activate(activation, gate.at(token, row))) * up.at(token, row) /
               out;
      });
      if (!form.saves) return;
      for (const auto& [product, place] : {std::pair{&gate, at.gate}, {&up, at.up}})
        fill(call, wide, call.tensors[place], m, h,
             [product = product](auto token, auto row) { return product->at(token, row); });
    }));
    if (alone_) return program;
    program.steps.emplace_back(HostFunction([=](const HostCall& call) {
      const RowProduct down(dtype, call.tensors[at.hidden], call.tensors[at.w_down], h,
                            scale_of(call, at.hidden_scale) * scale_of(call, at.w_down_scale));
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
