// Adding kernels to a program, one launch each: what the plain pipelines of `bench` are made of.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"

namespace fftune {

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

}  // namespace fftune
