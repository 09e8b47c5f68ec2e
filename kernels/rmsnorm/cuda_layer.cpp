#include "kernels/rmsnorm/cuda_layer.hpp"

#include <fmt/format.h>

#include "kernels/common/cuda_kernel.hpp"

namespace fftune::rmsnorm {
namespace {

std::string convention_type(Convention convention) {
  switch (convention) {
    case Convention::llama:
      return "fftune::llama_norm";
    case Convention::gemma:
      return "fftune::gemma_norm";
    case Convention::t5:
      break;
  }
  return "fftune::t5_norm";
}

}  // namespace

std::string template_arguments(const Layer& layer) {
  return fmt::format("{}, {}, {}, {}, {}", element_type(layer.dtype),
                     element_type(layer.weight_dtype), convention_type(layer.convention),
                     layer.adds, layer.saves);
}

std::vector<Argument> forward_arguments(const Layer& layer) {
  const Places at = places_of(layer);
  return {TensorArgument{at.x},
          tensor_or_null(at.residual),
          TensorArgument{at.w},
          TensorArgument{at.y},
          tensor_or_null(at.sum),
          tensor_or_null(at.rstd),
          tensor_or_null(at.scale),
          std::int64_t{layer.m},
          static_cast<std::int32_t>(layer.d),
          layer.eps};
}

std::vector<Argument> backward_arguments(const Layer& layer, const Argument& third) {
  const Places at = places_of(layer);
  return {TensorArgument{at.x},
          TensorArgument{at.w},
          TensorArgument{at.dy},
          tensor_or_null(at.dsum),
          tensor_or_null(at.rstd),
          TensorArgument{at.dx},
          third,
          std::int64_t{layer.m},
          static_cast<std::int32_t>(layer.d),
          layer.eps};
}

}  // namespace fftune::rmsnorm
