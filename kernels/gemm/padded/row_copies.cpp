#include "kernels/gemm/padded/row_copies.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/common/cuda_kernel.hpp"

namespace fftune {

void append_row_copies(Program& program, const std::vector<RowCopy>& copies,
                       const DeviceFacts& facts) {
  if (copies.empty()) return;
  ParameterStruct parameters;
  parameters.bytes = sizeof(row_copies);
  std::int64_t most = 1;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const row_copy& copy = copies[i].copy;
    const auto field = [&](std::size_t offset, Argument value) {
      parameters.fields.push_back({i * sizeof(row_copy) + offset, std::move(value)});
    };
    field(offsetof(row_copy, from), argument_of(copies[i].from));
    field(offsetof(row_copy, to), argument_of(copies[i].to));
    field(offsetof(row_copy, matrices), std::int64_t{copy.matrices});
    field(offsetof(row_copy, rows), std::int64_t{copy.rows});
    field(offsetof(row_copy, to_rows), std::int64_t{copy.to_rows});
    field(offsetof(row_copy, columns), std::int32_t{copy.columns});
    field(offsetof(row_copy, to_columns), std::int32_t{copy.to_columns});
    field(offsetof(row_copy, before), std::int32_t{copy.before});
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
