#include "kernels/gemm/launch.hpp"

#include <cstdint>

#include "core/error.hpp"

namespace fftune {

TensorArgument tensor_of(const TensorPlaces& places, std::string_view name) {
  const std::size_t place = places.at(name);
  if (place == absent) throw Error(ErrorKind::internal, "no tensor is named " + std::string(name));
  return {place};
}

ParameterStruct gemm_parameters(const GemmProblem& gemm, const TensorPlaces& places,
                                std::size_t bytes, std::size_t offset) {
  ParameterStruct parameters;
  parameters.bytes = bytes;
  const auto add = [&](std::size_t at, Argument value) {
    parameters.fields.push_back({offset + at, std::move(value)});
  };
  const auto pointer = [&](std::size_t at, std::string_view name) {
    if (!name.empty()) add(at, tensor_of(places, name));
  };
  constexpr std::size_t slot = sizeof(void*);
  for (std::size_t i = 0; i < gemm.a.size(); ++i)
    pointer(offsetof(gemm_params, a) + i * slot, gemm.a[i].front());
  // Of arrays [group][operand or output].
  const auto grouped = [&](std::size_t at, const std::vector<TensorNames>& tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i)
      for (std::size_t group = 0; group < tensors[i].size(); ++group)
        pointer(at + (group * 2 + i) * slot, tensors[i][group]);
  };
  grouped(offsetof(gemm_params, b), gemm.b);
  grouped(offsetof(gemm_params, c), gemm.c);
  grouped(offsetof(gemm_params, source), gemm.epilogue.source);
  for (std::size_t i = 0; i < row_broadcasts; ++i)
    pointer(offsetof(gemm_params, broadcasts) + i * slot, gemm.epilogue.rows[i]);
  pointer(offsetof(gemm_params, gate), gemm.epilogue.gate);
  pointer(offsetof(gemm_params, up), gemm.epilogue.up);
  pointer(offsetof(gemm_params, d_up), gemm.epilogue.d_up);
  pointer(offsetof(gemm_params, hidden), gemm.epilogue.hidden);
  const Quantisation& scales = gemm.quantisation;
  pointer(offsetof(gemm_params, a_scale), scales.a_scale);
  for (std::size_t i = 0; i < scales.b_scale.size(); ++i)
    pointer(offsetof(gemm_params, b_scale) + i * slot, scales.b_scale[i]);
  pointer(offsetof(gemm_params, c_scale), scales.c_scale);
  pointer(offsetof(gemm_params, mask), gemm.groups.mask);
  pointer(offsetof(gemm_params, offsets), gemm.groups.offsets);
  pointer(offsetof(gemm_params, permutation), gemm.groups.permutation);
  const auto size = [&](std::size_t at, std::int64_t value) {
    add(at, static_cast<std::int32_t>(value));
  };
  size(offsetof(gemm_params, groups), gemm.groups.count);
  size(offsetof(gemm_params, m), gemm.m);
  size(offsetof(gemm_params, n), gemm.n);
  size(offsetof(gemm_params, k), gemm.k);
  return parameters;
}

}  // namespace fftune
