// Row by row loops of the memory-bound ops on the CPU, compiled once for each vector instruction
// set.
#pragma once

#include <cstddef>
#include <string_view>

#include "core/dtype.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/cpu_vector.hpp"

namespace fftune {

/// rope's rotation of a head of `dim` features: y_i = x_i own_i + x_p other_i for i below `rotary`,
/// p the partner of i in the other half, or beside it if `interleaved`; the other features are
/// copied. `own` and `other` [rotary] can be read for row_rotation_margin elements more.
struct RowRotation {
  const void* own = nullptr;  // of double for f32, else of float
  const void* other = nullptr;
  std::size_t rotary = 0;
  std::size_t dim = 0;
  bool interleaved = false;
};
constexpr std::size_t row_rotation_margin = 16;

/// The same loops for one element type in one instruction set. `count` elements of a row; every
/// array but those of float holds elements of that type. All arithmetic is in float, every sum has
/// an order that `count` fixes, and results round to nearest even; activations that are rounded to
/// bf16 are as exact as that takes (cpu_activation.inc). `streams`: non-temporal stores,
/// for results far larger than the caches; other threads may read them once this one has called
/// `fence`.
struct RowKernels {
  /// The sum of x².
  float (*squares)(const void* x, std::size_t count);
  /// sum = x + other; returns the sum of squares of the result.
  float (*add)(const void* x, const void* other, void* sum, std::size_t count);
  /// y = r x ⊙ factor; r x is rounded before it is multiplied where `rounds`.
  void (*normalise)(const void* x, const float* factor, float r, bool rounds, void* y,
                    std::size_t count, bool streams);
  /// sums[0] = the sum of factor ⊙ dy ⊙ x, sums[1] = the sum of x².
  void (*products)(const void* x, const void* dy, const float* factor, std::size_t count,
                   float* sums);
  /// dx = r (factor ⊙ dy - r x mean) + dsum, where dsum may be null; dw += r x ⊙ dy.
  void (*norm_gradient)(const void* x, const void* dy, const void* dsum, const float* factor,
                        float r, float mean, void* dx, float* dw, std::size_t count, bool streams);
  /// y = act(x + bias)
  void (*bias_act)(Activation activation, const void* x, const float* bias, void* y,
                   std::size_t count, bool streams);
  /// dx = dy ⊙ act'(x + bias); dbias += dx before it is rounded, for a dbias that stays float where
  /// `exact`.
  void (*bias_act_gradient)(Activation activation, const void* x, const float* bias, const void* dy,
                            void* dx, float* dbias, bool exact, std::size_t count, bool streams);
  /// out = act(gate) ⊙ up
  void (*act_mul)(Activation activation, const void* gate, const void* up, void* out,
                  std::size_t count, bool streams);
  /// dgate = dout ⊙ up ⊙ act'(gate), dup = dout ⊙ act(gate)
  void (*act_mul_gradient)(Activation activation, const void* gate, const void* up,
                           const void* dout, void* dgate, void* dup, std::size_t count,
                           bool streams);
  /// y [heads, dim] = x rotated; y may be x. f32 is rotated in double.
  void (*rotate)(const void* x, const RowRotation& by, void* y, std::size_t heads, bool streams);
  /// scale times the sines and cosines of `count` angles: for f32 double, to a few 1e-16, else
  /// float, to 1e-7.
  void (*sines)(const float* angle, std::size_t count, double scale, void* sine, void* cosine);
  /// y = act(bias + the sum over j of taps_j ⊙ rows_j). The taps of each j are `tap_step` floats
  /// apart; `bias` may be null.
  void (*convolve)(Activation activation, const void* const* rows, const float* taps,
                   std::size_t tap_step, std::size_t width, const float* bias, void* y,
                   std::size_t count, bool streams);
  /// The gradient g of that sum, in float, and what it adds to those of taps and bias:
  /// g = dy ⊙ act', dtaps_j += g ⊙ rows_j, dbias += g.
  void (*convolve_gradient)(Activation activation, const void* const* rows, const float* taps,
                            std::size_t tap_step, std::size_t width, const float* bias,
                            const void* dy, float* g, float* dtaps, float* dbias,
                            std::size_t count);
  /// dx = more + the sum over j of taps_j ⊙ g_j, where `more` may be null.
  void (*spread)(const float* const* g, const float* taps, std::size_t tap_step, std::size_t width,
                 const void* more, void* dx, std::size_t count);
  /// Waits until this thread's non-temporal stores are visible. It is slow, so it is called once
  /// for many rows.
  void (*fence)();
};

/// For a CPU's DeviceFacts::arch: "avx512", "avx2", or else for the compiler's own target; f32 and
/// bf16.
const RowKernels& row_kernels(std::string_view isa, DType dtype);

/// The embedded sources whose change makes a choice among these loops stale.
constexpr const char* row_kernel_sources[] = {"common/cpu_rows.inc", "common/cpu_vector.inc"};
constexpr const char* rotation_source = "common/cpu_rotate.inc";
constexpr const char* activation_source = "common/cpu_activation.inc";

/// All loops in one instruction set.
struct IsaKernels {
  VectorKernels vector;
  RowKernels f32, bf16;
};
// Each is compiled for its instruction set, and there only on the processors that have it.
const IsaKernels& isa_kernels_avx2();
const IsaKernels& isa_kernels_avx512();
const IsaKernels& isa_kernels_portable();

}  // namespace fftune
