// Caches of keys and values in e4m3: the options of the ops that write and read them, and the
// tensors of their scales.
//
//   stored = e4m3(x / scale)    to nearest, ties to even; magnitudes beyond 448, infinities among
//   x      = stored * scale     them, saturate to it, and NaN stays NaN: as vLLM's caches
//
// Keys have k_scale and values v_scale, f32: one number for the tensor, or one for each head.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "registry/op.hpp"

namespace fftune {

struct CacheFormat {
  bool e4m3 = false;           // else of the problem's dtype
  bool scale_of_head = false;  // each head of k, and of v, has a scale of its own

  /// Elements of the caches of a problem of `own`.
  DType dtype(DType own) const { return e4m3 ? DType::fp8 : own; }
  /// The index of a head's scale.
  std::int64_t scale_at(std::int64_t kv_head) const { return scale_of_head ? kv_head : 0; }
};

/// cache-format and cache-scales, of one pass where that is not empty.
std::vector<OptionField> cache_format_options(const std::string& pass = {});
CacheFormat cache_format(const Problem& problem);
/// Op::contradiction() of the options.
std::string cache_format_contradiction(const Problem& problem);

/// The standard deviation of what test data's caches store: well above the subnormals of e4m3, and
/// below its largest number. The scales undo it.
double cache_deviation(const CacheFormat& format);
/// k_scale and v_scale; none without e4m3.
std::vector<TensorSpec> cache_scale_tensors(const CacheFormat& format, std::int64_t kv_heads);

}  // namespace fftune
