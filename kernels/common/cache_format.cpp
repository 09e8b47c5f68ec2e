#include "kernels/common/cache_format.hpp"

#include "kernels/common/op_parts.hpp"

namespace fftune {
namespace {

constexpr double e4m3_deviation = 16;

}  // namespace

std::vector<OptionField> cache_format_options(const std::string& pass) {
  return {
      rare_option("cache-format",
                  "element type of cached keys and values: that of q, or e4m3 with f32 scales",
                  {"same", "e4m3"}, pass),
      rare_option("cache-scales",
                  "scales of keys and of values in e4m3: one for the tensor, or each head's own",
                  {"tensor", "head"}, pass)};
}

CacheFormat cache_format(const Problem& problem) {
  return {problem.has("cache-format", "e4m3"), problem.has("cache-scales", "head")};
}

std::string cache_format_contradiction(const Problem& problem) {
  const CacheFormat format = cache_format(problem);
  if (!format.e4m3 && format.scale_of_head)
    return "cache-scales=head with cache-format=same: only e4m3 has scales";
  return "";
}

double cache_deviation(const CacheFormat& format) {
  return format.e4m3 ? e4m3_deviation : 1;
}

std::vector<TensorSpec> cache_scale_tensors(const CacheFormat& format, std::int64_t kv_heads) {
  std::vector<TensorSpec> tensors;
  if (!format.e4m3) return tensors;
  constexpr double scale = 1 / e4m3_deviation;
  for (const char* name : {"k_scale", "v_scale"})
    tensors.push_back(
        {name, DType::f32, {format.scale_of_head ? kv_heads : 1}, Role::input, scale / 10, scale});
  return tensors;
}

}  // namespace fftune
