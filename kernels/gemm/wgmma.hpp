// The launch side of wgmma_gemm.cuh: its space, its geometry, and what to use untuned.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/space.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/gemm/shape.hpp"
#include "kernels/gemm/wgmma_tile.hpp"

namespace fftune {

/// bm, bn, schedule, mma_warpgroups, cluster_m, cluster_n, split_k, stages, epilogue_stages,
/// group_m, with what limits them for this product on this device. `bn` counts columns of the
/// output: with two products a block computes 2 bn.
Space wgmma_space(const GemmShape& shape, const DeviceFacts& facts);

/// The feasible configuration of least wgmma_cost().
Config wgmma_default(const GemmShape& shape, const DeviceFacts& facts);

/// An estimate of the clock cycles a configuration takes, good enough to rank.
double wgmma_cost(const GemmShape& shape, const DeviceFacts& facts, const Config& config);

/// The configuration of the space with the least cost, of equal cost the deeper ring.
Config wgmma_cheapest(const Space& space, const std::function<double(const Config&)>& cost_of);
/// The same by wgmma_cost().
Config wgmma_cheapest(const Space& space, const GemmShape& shape, const DeviceFacts& facts);

/// The same for fp8, whose k tiles of 128 are added up in registers beside the sums. Their cost is
/// that of a product of half the k: a k tile has the same bytes and takes the same instructions.
///
/// With scales of blocks (scales.cuh) a tile has to lie as those do.
struct Fp8Scales {
  bool blocks = false;         // of the operands
  bool output_blocks = false;  // of the output too, which are found by the kernel
};
Space wgmma_fp8_space(const GemmShape& shape, const DeviceFacts& facts, Fp8Scales scales = {});
Config wgmma_fp8_default(const GemmShape& shape, const DeviceFacts& facts, Fp8Scales scales = {});
double wgmma_fp8_cost(const GemmShape& shape, const DeviceFacts& facts, const Config& config);

/// Dynamic shared memory of a block, in bytes: wgmma_layout::shared_bytes.
std::int64_t wgmma_shared_bytes(const Config& config, int products, int box_buffers = 1);

/// The template arguments that follow the types: the wgmma_tile, and the dynamic shared memory in
/// bytes, which the kernel checks against its own sum.
std::string wgmma_template_arguments(const Config& config, int products, int box_buffers = 1,
                                     bool one_owner = false);

/// The launch's matrices: a [m,k], b (one for each product) [n,k], c (one for each output of the
/// epilogue) [m,n].
struct WgmmaOperands {
  Pointer a;
  std::vector<Pointer> b;
  std::vector<Pointer> c;
  std::optional<Pointer> bias = std::nullopt;      // [n], added to every row of c
  std::optional<Pointer> residual = std::nullopt;  // [m,n], added to c
  DType dtype = DType::bf16;                       // of a and b
  DType c_dtype = DType::bf16;                     // of the first c and what is added to it
  DType sums_dtype = DType::bf16;                  // of each further c
  std::vector<Argument> scales = {};  // of fp8, in the order of the kernel's parameters
};

/// The tensor maps of a launch, whichever way its operands lie.
class WgmmaMaps {
 public:
  WgmmaMaps(const GemmShape& shape, const Config& config, DType dtype, DType c_dtype);
  TensorMapArgument a(const Pointer& matrix) const;
  TensorMapArgument b(const Pointer& matrix) const;
  TensorMapArgument c(const Pointer& matrix) const;  // or any matrix in c's boxes
  TensorMapArgument c(const Pointer& matrix, DType dtype) const;

 private:
  TensorMapArgument operand(const Pointer& matrix, bool transposed, std::int64_t rows,
                            int share) const;
  GemmShape shape_;
  WgmmaTile tile_;
  DType dtype_, c_dtype_;
};

/// The launch of the program's last kernel, without its arguments.
KernelLaunch wgmma_geometry(const Program& program, const GemmShape& shape,
                            const DeviceFacts& facts, const Config& config, bool programmatic);

/// Appends the last arguments of every kernel of the engine: the sizes and group_m.
void wgmma_append_sizes(KernelLaunch& launch, const Config& config,
                        const std::vector<std::int64_t>& sizes);

/// Appends the launch of the program's last kernel: the tensor maps of a, each b and each c, then,
/// where anything is added, the map of the residual (or c again) and the bias (or null), then the
/// scales, the three `sizes` and group_m. `programmatic`: it may start before the launch before it
/// is complete.
void wgmma_launch(Program& program, const GemmShape& shape, const DeviceFacts& facts,
                  const Config& config, const WgmmaOperands& operands,
                  const std::vector<std::int64_t>& sizes, bool programmatic);

}  // namespace fftune
