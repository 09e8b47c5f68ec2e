// Blocks of tokens on all threads, in float. Backward, each thread goes through its own tokens and
// adds up their dw; then the threads' sums are added up. Which tokens make a part is fixed, and so
// are the bits.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/cpu_task.hpp"
#include "kernels/gated_rmsnorm/gated_rmsnorm.hpp"

namespace fftune::gated_rmsnorm {
namespace {

/// One norm of a token, in float, with room for what is computed of it.
class Row {
 public:
  Row(const Layer& layer, const VectorKernels& kernels)
      : layer_(&layer),
        kernels_(&kernels),
        input_(count()),
        x_(count()),
        gate_(count()),
        slope_(count()),
        dy_(count()),
        dz_(count()),
        out_(count()) {}

  void load(const std::byte* x, const std::byte* z) {
    decode(layer_->dtype, x, std::span(x_));
    decode(layer_->dtype, z, std::span(dz_).first(layer_->row_gate ? 1 : count()));
    if (layer_->row_gate) std::fill(dz_.begin() + 1, dz_.end(), dz_[0]);
    make_gate();
    double squares = 0;
    for (std::size_t i = 0; i < count(); ++i) {
      input_[i] = layer_->before ? x_[i] * gate_[i] : x_[i];
      squares += double{input_[i]} * input_[i];
    }
    r_ = static_cast<float>(
        1 / std::sqrt(squares / static_cast<double>(layer_->d) + double{layer_->eps}));
  }

  void normalise(const float* w, std::byte* y) {
    if (!layer_->normed) {
      for (std::size_t i = 0; i < count(); ++i) out_[i] = x_[i] * gate_[i];
      encode(layer_->dtype, std::span<const float>(out_), y);
      return;
    }
    for (std::size_t i = 0; i < count(); ++i) out_[i] = input_[i] * r_;
    round(true, y);
    for (std::size_t i = 0; i < count(); ++i) out_[i] *= w[i];
    if (!layer_->before) {
      round(layer_->weight_dtype == layer_->dtype, y);
      for (std::size_t i = 0; i < count(); ++i) out_[i] *= gate_[i];
    }
    encode(layer_->dtype, std::span<const float>(out_), y);
  }

  /// And its summand of dw [d].
  void differentiate(const std::byte* dy, const float* w, std::byte* dx, std::byte* dz, float* dw) {
    decode(layer_->dtype, dy, std::span(dy_));
    double product = 0;
    for (std::size_t i = 0; i < count(); ++i) {
      out_[i] = layer_->before ? dy_[i] : dy_[i] * gate_[i];  // of the norm's result
      product += double{out_[i]} * w[i] * input_[i];
    }
    const float mean = static_cast<float>(product * r_ / static_cast<double>(layer_->d));
    for (std::size_t i = 0; i < count(); ++i) {
      const float normed = input_[i] * r_;
      dw[i] += out_[i] * normed;
      float gradient = r_ * (out_[i] * w[i] - normed * mean);
      // A row of one element: the difference would keep no digit.
      if (layer_->d == 1) gradient = r_ * out_[i] * w[i] * (layer_->eps * r_ * r_);
      dz_[i] = (layer_->before ? gradient * x_[i] : dy_[i] * normed * w[i]) * slope_[i];
      out_[i] = layer_->before ? gradient * gate_[i] : gradient;
    }
    encode(layer_->dtype, std::span<const float>(out_), dx);
    encode(layer_->dtype, std::span<const float>(dz_), dz);
  }

 private:
  std::size_t count() const { return static_cast<std::size_t>(layer_->d); }

  /// The gate's activation and its derivative, of z in dz_.
  void make_gate() {
    constexpr float far = 87;  // where the sigmoid is 0 or 1 in float
    for (std::size_t i = 0; i < count(); ++i) slope_[i] = std::clamp(-dz_[i], -far, far);
    kernels_->exponentials(slope_.data(), 0, count());
    for (std::size_t i = 0; i < count(); ++i) {
      const float z = dz_[i];
      float s = 1 / (1 + slope_[i]);
      s = z < -far ? 0 : z == z ? s : z;
      const float value = layer_->sigmoid ? s : z * s;
      slope_[i] = layer_->sigmoid ? s * (1 - s) : s + value * (1 - s);
      gate_[i] = value;
    }
  }
  /// By way of memory of the op's dtype.
  void round(bool also, std::byte* memory) {
    if (!layer_->rounds || !also || layer_->dtype == DType::f32) return;
    encode(layer_->dtype, std::span<const float>(out_), memory);
    decode(layer_->dtype, memory, std::span(out_));
  }

  const Layer* layer_;
  const VectorKernels* kernels_;
  float r_ = 0;
  std::vector<float> input_, x_, gate_, slope_, dy_, dz_, out_;
};

RowWork work(const Problem& problem) {
  const Layer layer = layer_of(problem);
  return {.rows = layer.m,
          .row_bytes = layer.width() * static_cast<std::int64_t>(dtype_bytes(layer.dtype)),
          .sums = layer.backward,
          .nontemporal = false};
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const TensorPlaces at(tensors_of(layer));
  const VectorKernels& kernels = vector_kernels(facts.arch);
  const std::size_t width = static_cast<std::size_t>(layer.width());
  const RowWork rows = work(problem);
  Program program;
  program.host_tensors = at.count();
  program.scratch = {{width * sizeof(float), false}};
  if (layer.backward) {
    program.scratch.push_back(RowParts(rows, config).scratch(layer.width()));
    program.scratch.push_back({layer.frozen ? width * sizeof(float) : 0, false});
  }
  program.steps.emplace_back(HostFunction([=, &kernels](const HostCall& call) {
    const auto tensor = [&](const char* name) { return address_of(call, at.at(name)); };
    auto* const w = reinterpret_cast<float*>(call.scratch[0]);
    if (layer.normed)
      decode(layer.weight_dtype, tensor("w"),
             std::span(w, static_cast<std::size_t>(layer.w_width())));
    const auto part = [&](void* matrix, std::int64_t token, std::int64_t group,
                          std::int64_t stride) {
      return static_cast<std::byte*>(matrix) +
             static_cast<std::size_t>(token * stride + group * layer.d) * dtype_bytes(layer.dtype);
    };
    void *const x = tensor("x"), *const z = tensor("z"), *const y = tensor("y");
    void *const dy = tensor("dy"), *const dx = tensor("dx"), *const dz = tensor("dz");
    const auto take = [&](Row& row, std::int64_t token, float* dw) {
      for (std::int64_t group = 0; group < layer.groups; ++group) {
        const auto own = [&](void* matrix) { return part(matrix, token, group, layer.width()); };
        row.load(own(x), layer.row_gate
                             ? part(z, token, 0, layer.z_row) +
                                   static_cast<std::size_t>(group) * dtype_bytes(layer.dtype)
                             : part(z, token, group, layer.z_row));
        const float* const weights = w + (layer.one_w ? 0 : group * layer.d);
        if (layer.backward)
          row.differentiate(own(dy), weights, own(dx), own(dz), dw + group * layer.d);
        else
          row.normalise(weights, own(y));
      }
    };
    const auto no_fence = [] {};
    if (!layer.backward) {
      RowTasks(rows, config)
          .run(call.parallel, no_fence,
               [&take, row = Row(layer, kernels)](std::int64_t token) mutable {
                 take(row, token, nullptr);
               });
      return;
    }
    const RowParts parts(rows, config);
    std::vector<Row> of_part(static_cast<std::size_t>(parts.parts), Row(layer, kernels));
    const auto* const first = reinterpret_cast<const float*>(call.scratch[1]);
    parts.run(call, no_fence, call.scratch[1], layer.width(),
              layer.frozen ? DType::f32 : layer.weight_dtype,
              layer.frozen ? call.scratch[2] : tensor("dw"), [&](std::int64_t token, float* sums) {
                take(of_part[static_cast<std::size_t>(sums - first) / width], token, sums);
              });
  }));
  return program;
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const auto families = cpu_row_families(
      {"cpu_forward", "cpu_backward"}, "blocks of tokens, on all threads",
      {"gated_rmsnorm/cpu_gated_rmsnorm.cpp", vector_kernel_source}, {work, program});
  return addresses_of(families);
}

}  // namespace fftune::gated_rmsnorm
