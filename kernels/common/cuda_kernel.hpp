// The host's side of the CUDA kernels of every op: their types' names, why none can serve, how
// their threads share rows, and how they are added to a program.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dtype.hpp"
#include "core/problem.hpp"
#include "core/space.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"

namespace fftune {

/// Of common/float16.cuh: "float", "fftune::bf16", "fftune::fp16".
inline std::string element_type(DType dtype) {
  return dtype == DType::f32 ? "float" : "fftune::" + std::string(dtype_name(dtype));
}

/// Of common/types.cuh: "int", "fftune::i64".
inline std::string integer_type(DType dtype) {
  return dtype == DType::i64 ? "fftune::i64" : "int";
}

/// Why a CUDA kernel that computes `pass` cannot serve the problem on the device, one line.
std::optional<std::string> refuse_cuda(const Problem& problem, std::string_view pass,
                                       const DeviceFacts& facts);

constexpr std::int64_t quotient_up(std::int64_t value, std::int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

/// The widest access, in bytes, that every row of `row_bytes` is aligned to: 16 at most.
constexpr std::int64_t widest_vector(std::int64_t row_bytes) {
  return std::min<std::int64_t>(16, row_bytes & -row_bytes);
}

/// The least power of two that is not below `value`.
constexpr std::int64_t power_of_two(std::int64_t value) {
  std::int64_t power = 1;
  while (power < value) power *= 2;
  return power;
}

/// 32-bit registers that elements of `bytes` take as they came from memory: two a register where
/// two came together.
constexpr std::int64_t raw_registers(std::int64_t elements, std::int64_t bytes,
                                     std::int64_t elements_of_vector) {
  return bytes == 2 && elements_of_vector > 1 ? elements / 2 : elements;
}

/// What a thread of a block this large may use: the register file shared out, and at most what an
/// instruction can name.
inline std::int64_t registers_of_thread(const DeviceFacts& facts, std::int64_t block_threads) {
  const std::int64_t shared_out = facts.registers_per_multiprocessor / block_threads / 8 * 8;
  return std::min<std::int64_t>(255, shared_out);
}

/// Adds the kernel `fftune::<expression>` of `file`, and a launch of it with blocks of `threads`
/// threads as the next step. The launch is for changing at once: it moves with the next step.
KernelLaunch& append_kernel(Program& program, const std::string& file,
                            const std::string& expression, Dim3 grid, std::uint32_t threads,
                            std::vector<Argument> arguments);

/// Blocks over a matrix: as many side by side as there are `columns_of_block` in a row, and one
/// below the other for each row, up to what a grid can have; from there on blocks go on.
Dim3 grid_of_matrix(std::int64_t rows, std::int64_t columns, std::int64_t columns_of_block);

/// Adds the kernel `name` of `file`, a column_sum (common/column_sum.cuh) in `dtype` of partial
/// [rows, columns] to `out` [columns]. On compute capability 9.0 its blocks may start early.
void append_column_sum(Program& program, const DeviceFacts& facts, const std::string& file,
                       const std::string& name, DType dtype, ScratchArgument partial,
                       TensorArgument out, std::int64_t rows, std::int64_t columns);

// The parameter l2_prefetch of the row kernels that, launched by programmatic dependent launch, can
// prefetch their first rows to L2 before griddepcontrol.wait (common/dependency.cuh).

/// Whether a kernel whose rows are so many bytes apart, or a multiple of that, can prefetch them:
/// it needs programmatic dependent launch, and cp.async.bulk.prefetch.L2 takes multiples of 16
/// bytes.
inline bool can_prefetch_l2(const DeviceFacts& facts, std::int64_t row_alignment) {
  return facts.compute_capability >= 90 && row_alignment % 16 == 0;
}

/// Whether so many threads, those of all blocks, leave half of every SM free: all blocks are then
/// resident beside those of the kernel before.
inline bool all_resident(const DeviceFacts& facts, std::int64_t threads) {
  return threads <= 1024 * std::int64_t{facts.multiprocessors};
}

/// Adds the parameter l2_prefetch. `can`: can_prefetch_l2(). `threads`: of all blocks of a
/// configuration; it reads the parameters `reads`.
inline void add_l2_prefetch(Space& space, const DeviceFacts& facts, bool can,
                            std::function<std::int64_t(const Config&)> threads,
                            std::vector<std::string> reads) {
  reads.emplace_back("l2_prefetch");
  space
      .parameter(
          "l2_prefetch",
          "1: the first rows are prefetched to L2 before griddepcontrol.wait; 0: no prefetch",
          {0, 1})
      .constraint("the L2 prefetch needs programmatic dependent launch, and rows of whole 16 bytes",
                  [can](const Config& c) { return c.at("l2_prefetch") == 0 || can; },
                  {"l2_prefetch"})
      .constraint(
          "the L2 prefetch is in time only if all blocks are resident beside the kernel before",
          [facts, threads = std::move(threads)](const Config& c) {
            return c.at("l2_prefetch") == 0 || all_resident(facts, threads(c));
          },
          std::move(reads));
}

}  // namespace fftune
