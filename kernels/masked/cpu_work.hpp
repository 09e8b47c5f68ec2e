// What the CPU families share: the tokens in the order of their experts, rows in f32, and what
// becomes of the sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/config.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/cpu_vector.hpp"
#include "kernels/masked/masked.hpp"

namespace fftune::masked {

/// The tokens of the true expert, then those of the other, each in their order.
struct Grouping {
  const std::int64_t* order;  // [m]
  std::int64_t marked;        // how many the true expert has
};

/// Sorts the tokens into `order`, room for as many.
inline Grouping group(const std::uint8_t* mask, std::int64_t tokens, std::int64_t* order) {
  std::int64_t marked = 0;
  for (std::int64_t token = 0; token < tokens; ++token) marked += mask[token] != 0;
  std::int64_t next[2] = {marked, 0};
  for (std::int64_t token = 0; token < tokens; ++token) order[next[mask[token] != 0]++] = token;
  return {order, marked};
}

/// Scratch for the order.
inline Scratch order_scratch(std::int64_t tokens) {
  return {static_cast<std::size_t>(tokens) * sizeof(std::int64_t), false};
}

/// Tensors of f32 or bf16, and the loops over them.
struct CpuTensors {
  DType dtype = DType::f32;
  Activation activation = Activation::none;
  const VectorKernels* vector = nullptr;
  const RowKernels* loops = nullptr;  // of f32

  CpuTensors(const Problem& problem, const DeviceFacts& facts);

  /// `count` elements from element `at` of a tensor on, as f32, and back.
  void load(const void* tensor, std::int64_t at, float* to, std::int64_t count) const;
  void store(const float* from, void* tensor, std::int64_t at, std::int64_t count) const;

  /// Finishes `count` neighbouring sums of a product, from element `at` of its outputs on: `second`
  /// are those of its second product, unused with one. Both are overwritten.
  void finish(const StageProduct& work, const HostCall& call, std::int64_t at, float* first,
              float* second, std::int64_t count) const;
  /// The same of an expert's result: adds what is added, and stores.
  void finish(const StageSum& work, const HostCall& call, std::size_t expert, std::size_t result,
              std::int64_t at, float* sums, std::int64_t count) const;
};

/// How many tensors the stage's functions look at.
std::size_t host_tensors(Stage stage, const Problem& problem);

/// Why a CPU family of these stages cannot serve the problem.
std::optional<std::string> refuse_host(const std::vector<Stage>& stages, const Problem& problem);

}  // namespace fftune::masked
