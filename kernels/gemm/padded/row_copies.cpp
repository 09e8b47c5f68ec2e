#include "kernels/gemm/padded/row_copies.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/parameter_fields.hpp"

namespace fftune {

void append_row_copies(Program& program, const std::vector<RowCopy>& copies,
                       const DeviceFacts& facts) {
  if (copies.empty()) return;
  ParameterStruct parameters;
  parameters.bytes = sizeof(row_copies);
  std::int64_t most = 1;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const row_copy& copy = copies[i].copy;
    ParameterFields<row_copy>(parameters, i * sizeof(row_copy))
        .set(&row_copy::from, argument_of(copies[i].from), &row_copy::to, argument_of(copies[i].to),
             &row_copy::matrices, copy.matrices, &row_copy::rows, copy.rows, &row_copy::to_rows,
             copy.to_rows, &row_copy::columns, copy.columns, &row_copy::to_columns, copy.to_columns,
             &row_copy::before, copy.before);
    most = std::max<std::int64_t>(most, copy.matrices * copy.to_rows * copy.to_columns);
  }
  constexpr std::int64_t of_block = 8 * row_copy_threads * row_copy_unroll, blocks_of_processor = 8;
  const auto blocks = static_cast<std::uint32_t>(
      std::min(quotient_up(most, of_block),
               blocks_of_processor * std::max<std::int64_t>(facts.multiprocessors, 1)));
  KernelLaunch& launch =
      append_pdl_kernel(program, facts, row_copy_source, "copy_rows",
                        {blocks, static_cast<std::uint32_t>(copies.size())}, row_copy_threads, {});
  launch.parameters = std::move(parameters);
}

}  // namespace fftune
