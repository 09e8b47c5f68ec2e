// Appending kernel launches to a program: the baselines of `bench` are built from them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"

namespace fftune {

/// Appends the kernel `fftune::<expression>` of `file` and a launch of it with `threads` threads a
/// block. The reference that it returns is valid until the next step is appended.
KernelLaunch& append_kernel(Program& program, const std::string& file,
                            const std::string& expression, Dim3 grid, std::uint32_t threads,
                            std::vector<Argument> arguments);

/// The grid over a matrix: x covers the columns, `columns_of_block` a block; y is a block for each
/// row, 65,535 at most: kernels loop over further rows.
Dim3 grid_of_matrix(std::int64_t rows, std::int64_t columns, std::int64_t columns_of_block);

/// Adds the kernel `name` of `file`, a column_sum (common/column_sum.cuh) in `dtype` of partial
/// [rows, columns] to `out` [columns]. On compute capability 9.0 the launch
/// is programmatic.
void append_column_sum(Program& program, const DeviceFacts& facts, const std::string& file,
                       const std::string& name, DType dtype, ScratchArgument partial,
                       TensorArgument out, std::int64_t rows, std::int64_t columns);

}  // namespace fftune
