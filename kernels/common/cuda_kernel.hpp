// The host side of the CUDA kernels of all ops: names of device types, the common can_implement
// check, the mapping of threads to rows, and appending launches to a program.
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

/// Type names of common/numerics.cuh: "float", "fftune::bf16", "fftune::fp16".
inline std::string element_type(DType dtype) {
  return dtype == DType::f32 ? "float" : "fftune::" + std::string(dtype_name(dtype));
}

/// Type names of common/types.cuh: "int", "fftune::i64".
inline std::string integer_type(DType dtype) {
  return dtype == DType::i64 ? "fftune::i64" : "int";
}

/// Why a CUDA kernel that computes `pass` cannot run the problem on the device, one line.
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

/// 32-bit registers of elements of `bytes` as loaded: 16-bit elements of one access are two to a
/// register.
constexpr std::int64_t raw_registers(std::int64_t elements, std::int64_t bytes,
                                     std::int64_t elements_of_vector) {
  return bytes == 2 && elements_of_vector > 1 ? elements / 2 : elements;
}

/// Registers available to a thread of a block this large: its share of the register file, 255 at
/// most.
inline std::int64_t registers_of_thread(const DeviceFacts& facts, std::int64_t block_threads) {
  const std::int64_t shared_out = facts.registers_per_multiprocessor / block_threads / 8 * 8;
  return std::min<std::int64_t>(255, shared_out);
}

/// Appends the kernel `fftune::<expression>` of `file` and a launch of it with `threads` threads a
/// block. The reference that it returns is valid until the next step is appended.
KernelLaunch& append_kernel(Program& program, const std::string& file,
                            const std::string& expression, Dim3 grid, std::uint32_t threads,
                            std::vector<Argument> arguments);

/// The same for a kernel that executes griddepcontrol.wait before it reads: on compute capability
/// 9.0 the launch is programmatic.
KernelLaunch& append_pdl_kernel(Program& program, const DeviceFacts& facts, const std::string& file,
                                const std::string& expression, Dim3 grid, std::uint32_t threads,
                                std::vector<Argument> arguments);

/// A program of that launch alone.
Program pdl_program(const DeviceFacts& facts, const std::string& file,
                    const std::string& expression, Dim3 grid, std::uint32_t threads,
                    std::vector<Argument> arguments);

/// The grid over a matrix: x covers the columns, `columns_of_block` a block; y is a block for each
/// row, 65,535 at most: kernels loop over further rows.
Dim3 grid_of_matrix(std::int64_t rows, std::int64_t columns, std::int64_t columns_of_block);

/// Adds the kernel `name` of `file`, a column_sum (common/columns.cuh) in `dtype` of partial
/// [rows, columns] to `out` [columns]. On compute capability 9.0 the launch
/// is programmatic.
void append_column_sum(Program& program, const DeviceFacts& facts, const std::string& file,
                       const std::string& name, DType dtype, ScratchArgument partial,
                       TensorArgument out, std::int64_t rows, std::int64_t columns);

// The parameter l2_prefetch of the row kernels that, launched by programmatic dependent launch, can
// prefetch their first rows to L2 before griddepcontrol.wait (common/async.cuh).

/// Whether a kernel can prefetch rows whose stride is a multiple of `row_alignment` bytes: it needs
/// programmatic dependent launch, and cp.async.bulk.prefetch.L2 takes multiples of 16 bytes.
inline bool can_prefetch_l2(const DeviceFacts& facts, std::int64_t row_alignment) {
  return facts.compute_capability >= 90 && row_alignment % 16 == 0;
}

/// Whether `threads` threads, those of all blocks, leave half of every SM free: all blocks are then
/// resident beside those of the kernel before.
inline bool all_resident(const DeviceFacts& facts, std::int64_t threads) {
  return threads <= 1024 * std::int64_t{facts.multiprocessors};
}

/// Adds the parameter vector: an access has at least one element, and the rows, or `aligned`, are
/// aligned to it, whose widest_vector() is `widest`.
Space& add_vector(Space& space, std::int64_t element_bytes, std::int64_t widest,
                  const char* aligned = "rows");
/// The same for kernels that narrow accesses cost instructions alone: these are left out.
Space& add_wide_vector(Space& space, std::int64_t element_bytes, std::int64_t widest,
                       const char* aligned = "rows");

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
      .when_absent(0)
      .constraint("the L2 prefetch needs programmatic dependent launch, and rows of whole 16 bytes",
                  [can](const Config& c) { return c.at("l2_prefetch") == 0 || can; },
                  {"l2_prefetch"})
      .constraint(
          "the L2 prefetch is in time only if all blocks are resident while the preceding kernel "
          "runs",
          [facts, threads = std::move(threads)](const Config& c) {
            return c.at("l2_prefetch") == 0 || all_resident(facts, threads(c));
          },
          std::move(reads));
}

}  // namespace fftune
