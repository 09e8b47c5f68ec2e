// The backward pass of masked-linear on the CPU: plain loops over any sizes and types.
#include <algorithm>
#include <cstddef>
#include <span>

#include "kernels/masked/families.hpp"
#include "kernels/masked/masked.hpp"

namespace fftune::masked {
namespace {

constexpr std::size_t chunk = 256;  // of a row, in float on the stack

/// What both stages read and write.
struct Work {
  DType dtype = DType::f32;
  std::size_t m = 0, n = 0, k = 0;
  LinearPlaces places;
  bool adds = false;

  const std::byte* at(const HostCall& call, std::size_t tensor, std::size_t element) const {
    return static_cast<const std::byte*>(call.tensors[tensor]) + element * dtype_bytes(dtype);
  }
  float value(const HostCall& call, std::size_t tensor, std::size_t element) const {
    float value = 0;
    decode(dtype, at(call, tensor, element), {&value, 1});
    return value;
  }
  bool marked(const HostCall& call, std::size_t token) const {
    return static_cast<const std::uint8_t*>(call.tensors[places.mask])[token] != 0;
  }
  void store(const HostCall& call, std::size_t tensor, std::size_t element,
             std::span<const float> values) const {
    encode(dtype, values,
           static_cast<std::byte*>(call.tensors[tensor]) + element * dtype_bytes(dtype));
  }
};

/// Row `token` of dx: rows of its expert's weights, each times an element of dy.
void token_gradient(const Work& work, const HostCall& call, std::size_t token) {
  const std::size_t weights = work.places.w[work.marked(call, token) ? 0 : 1];
  for (std::size_t first = 0; first < work.k; first += chunk) {
    const std::size_t count = std::min(chunk, work.k - first);
    float sums[chunk] = {}, row[chunk];
    for (std::size_t j = 0; j < work.n; ++j) {
      const float factor = work.value(call, work.places.dy, token * work.n + j);
      decode(work.dtype, work.at(call, weights, j * work.k + first), {row, count});
      for (std::size_t i = 0; i < count; ++i) sums[i] += factor * row[i];
    }
    work.store(call, work.places.dx, token * work.k + first, {sums, count});
  }
}

/// Row `feature` of both dw: the tokens of either expert in their order.
void feature_gradients(const Work& work, const HostCall& call, std::size_t feature) {
  for (std::size_t first = 0; first < work.k; first += chunk) {
    const std::size_t count = std::min(chunk, work.k - first);
    float sums[2][chunk] = {}, row[chunk];
    const std::size_t at = feature * work.k + first;
    for (std::size_t expert = 0; work.adds && expert < 2; ++expert)
      decode(work.dtype, work.at(call, work.places.dw_before[expert], at), {sums[expert], count});
    for (std::size_t token = 0; token < work.m; ++token) {
      float* const sum = sums[work.marked(call, token) ? 0 : 1];
      const float factor = work.value(call, work.places.dy, token * work.n + feature);
      decode(work.dtype, work.at(call, work.places.x, token * work.k + first), {row, count});
      for (std::size_t i = 0; i < count; ++i) sum[i] += factor * row[i];
    }
    for (std::size_t expert = 0; expert < 2; ++expert)
      work.store(call, work.places.dw[expert], at, {sums[expert], count});
  }
}

class CpuBackward final : public Family {
 public:
  std::string_view name() const override { return "cpu_backward"; }
  std::string_view summary() const override { return "plain loops for any sizes: the fallback"; }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  std::vector<std::string> stages() const override {
    return {stage_name(Stage::dx), stage_name(Stage::dw)};
  }
  bool is_fallback() const override { return true; }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    return refuse_pass(Stage::dx, problem);
  }
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }

  Program program(const Problem& problem, const DeviceFacts&, const Config&) const override {
    const Work work{problem.dtype,
                    static_cast<std::size_t>(problem.size("m")),
                    static_cast<std::size_t>(problem.size("n")),
                    static_cast<std::size_t>(problem.size("k")),
                    linear_places(problem),
                    accumulates(problem)};
    Program program;
    program.host_tensors = work.places.dw[1] + 1;
    program.steps.emplace_back(HostFunction([=](const HostCall& call) {
      const auto threads = call.parallel.max_threads();
      call.parallel.run(static_cast<int>(work.m), threads, [&](int token) {
        token_gradient(work, call, static_cast<std::size_t>(token));
      });
      call.parallel.run(static_cast<int>(work.n), threads, [&](int feature) {
        feature_gradients(work, call, static_cast<std::size_t>(feature));
      });
    }));
    return program;
  }

  std::vector<std::string> sources() const override { return {"masked/cpu_backward.cpp"}; }
};

}  // namespace

const Family& cpu_backward_family() {
  static const CpuBackward family;
  return family;
}

}  // namespace fftune::masked
