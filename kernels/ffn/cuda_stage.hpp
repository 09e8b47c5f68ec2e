// What the CUDA families of ffn's two stages share: a stage seen as a matrix product.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/gemm/shape.hpp"

namespace fftune::ffn {

enum class CudaStage { gate_up, down };

/// "gate_up" or "down": the stage's name, and what its kernels' names begin with.
std::string stage_name(CudaStage stage);

/// gate_up is [m,d] by two [h,d], down is [m,h] by [d,h].
GemmShape gemm_of(CudaStage stage, const Problem& problem);

/// The tensors in the order of every kernel's first parameters: x, w_gate, w_up, hidden, gate, up,
/// or hidden, w_down, y, b_down, residual; null for those that the problem's form does without.
std::vector<Argument> tensor_arguments(CudaStage stage, const Problem& problem);

/// The scales in the order of an fp8 kernel's parameters: x, w_gate, w_up, hidden, or hidden,
/// w_down. Empty where the problem has none.
std::vector<Argument> scale_arguments(CudaStage stage, const Problem& problem);

/// What a kernel of fp8 has in its name: "_fp8", or "_fp8_blocks" with scales of blocks.
std::string fp8_suffix(const Problem& problem);

/// m, d, h: the size parameters of every kernel.
std::vector<std::int64_t> size_arguments(const Problem& problem);

/// The kernel `name` in ffn/<file>.cu with its element type, its epilogue and then `rest` as
/// template arguments: "fftune::down_sm80<fftune::bf16, fftune::linear_epilogue<false, false>, 64,
/// ...>".
KernelSource kernel_source(CudaStage stage, const std::string& file, const std::string& name,
                           const Problem& problem, const std::string& rest = "");

/// Whether the stage's launch may be programmatic: the first stage of a plan waits for whatever ran
/// before it; those behind it may start early and fetch their weights while the one before them is
/// still at work, which takes compute capability 9.0.
bool may_start_early(CudaStage stage, const Problem& problem, const DeviceFacts& facts);

/// Why a kernel of mma.sync and 16-byte rows cannot serve the problem, one line.
std::optional<std::string> refuse_tensor_cores(const Problem& problem, const DeviceFacts& facts,
                                               std::optional<CudaStage> stage = std::nullopt);

/// Why rows of the problem's sizes and dtype cannot be loaded 16 bytes at a time.
std::optional<std::string> refuse_rows(const Problem& problem);

/// Why no CUDA kernel of this folder's stage, or of both, can serve it. gate_up is a stage of the
/// pass bwd too, where that computes gate and up again.
std::optional<std::string> refuse_cuda(const Problem& problem, const DeviceFacts& facts,
                                       std::optional<CudaStage> stage = std::nullopt);

}  // namespace fftune::ffn
