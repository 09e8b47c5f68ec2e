// Copies of rows between memory with and without alignment, on the host's side.
#pragma once

#include <vector>

#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/gemm/padded/params.cuh"

namespace fftune {

constexpr const char* row_copy_source = "gemm/padded/copy.cu";

/// `copy` has the sizes; its addresses are `from` and `to`, 16-byte aligned.
struct RowCopy {
  row_copy copy;
  Pointer from, to;
};

/// Appends one launch of all copies, most_row_copies at most; none if there are none.
void append_row_copies(Program& program, const std::vector<RowCopy>& copies,
                       const DeviceFacts& facts);

}  // namespace fftune
