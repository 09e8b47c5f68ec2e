#include "kernels/masked/cpu_work.hpp"

#include <algorithm>

namespace fftune::masked {
namespace {

constexpr std::int64_t chunk = 256;  // elements that are finished at a time, on the stack

}  // namespace

CpuTensors::CpuTensors(const Problem& problem, const DeviceFacts& facts)
    : dtype(problem.dtype),
      vector(&vector_kernels(facts.arch)),
      loops(&row_kernels(facts.arch, DType::f32)) {
  const auto act = problem.options.find("act");
  if (act != problem.options.end()) activation = parse_activation(act->second);
}

void CpuTensors::load(const void* tensor, std::int64_t at, float* to, std::int64_t count) const {
  if (dtype == DType::f32)
    std::copy_n(static_cast<const float*>(tensor) + at, count, to);
  else
    vector->widen(static_cast<const std::uint16_t*>(tensor) + at, to,
                  static_cast<std::size_t>(count));
}

void CpuTensors::store(const float* from, void* tensor, std::int64_t at, std::int64_t count) const {
  if (dtype == DType::f32)
    std::copy_n(from, count, static_cast<float*>(tensor) + at);
  else
    vector->narrow(from, static_cast<std::uint16_t*>(tensor) + at, static_cast<std::size_t>(count));
}

void CpuTensors::finish(const StageProduct& work, const HostCall& call, std::int64_t at,
                        float* first, float* second, std::int64_t count) const {
  const auto tensor = [&](std::size_t place) { return call.tensors[place]; };
  if (work.gradient) {
    float gate[chunk], up[chunk], d_gate[chunk], d_up[chunk];
    for (std::int64_t i = 0; i < count; i += chunk) {
      const std::int64_t part = std::min(chunk, count - i);
      const auto elements = static_cast<std::size_t>(part);
      load(tensor(work.gradient->gate), at + i, gate, part);
      load(tensor(work.gradient->up), at + i, up, part);
      loops->act_mul_gradient(activation, gate, up, first + i, d_gate, d_up, elements, false);
      store(d_gate, tensor(work.c[0]), at + i, part);
      store(d_up, tensor(work.c[1]), at + i, part);
      if (work.c.size() < 3) continue;
      loops->act_mul(activation, gate, up, gate, elements, false);
      store(gate, tensor(work.c[2]), at + i, part);
    }
    return;
  }
  if (work.shape.products == 2) {
    if (work.c.size() == 3) {
      store(first, tensor(work.c[1]), at, count);
      store(second, tensor(work.c[2]), at, count);
    }
    vector->gated(activation, first, second, first, static_cast<std::size_t>(count));
  }
  store(first, tensor(work.c[0]), at, count);
}

void CpuTensors::finish(const StageSum& work, const HostCall& call, std::size_t expert,
                        std::size_t result, std::int64_t at, float* sums,
                        std::int64_t count) const {
  if (!work.addends[expert].empty()) {
    float more[chunk];
    for (std::int64_t i = 0; i < count; i += chunk) {
      const std::int64_t part = std::min(chunk, count - i);
      load(call.tensors[work.addends[expert][result]], at + i, more, part);
      for (std::int64_t j = 0; j < part; ++j) sums[i + j] += more[j];
    }
  }
  store(sums, call.tensors[work.c[expert][result]], at, count);
}

std::size_t host_tensors(Stage stage, const Problem& problem) {
  std::size_t count = 0;
  const auto see = [&](const std::vector<std::size_t>& places) {
    for (const std::size_t place : places) count = std::max(count, place + 1);
  };
  if (sums_over_tokens(stage)) {
    const StageSum sum = sum_of(stage, problem);
    see(sum.a);
    see({sum.b, sum.mask});
    for (const auto& own : sum.c) see(own);
    for (const auto& own : sum.addends) see(own);
  } else {
    const StageProduct product = product_of(stage, problem);
    see(product.a);
    see({product.mask});
    for (const auto& own : product.b) see(own);
    see(product.c);
    if (product.gradient) see({product.gradient->gate, product.gradient->up});
  }
  return count;
}

std::optional<std::string> refuse_host(const std::vector<Stage>& stages, const Problem& problem) {
  for (const Stage stage : stages)
    if (auto refusal = refuse_stage(stage, problem)) return refusal;
  if (stages == std::vector{Stage::gate_up} && problem.pass == "fwd")
    return "hidden alone is for a backward pass that computes gate and up again";
  return std::nullopt;
}

}  // namespace fftune::masked
