// The launches of unfused pipelines that put rows where they belong, between library products.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/problem.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"

namespace fftune::masked {

/// A launch of the program's last kernel over [rows, columns], 256 threads of 16 bytes each.
KernelLaunch rows_launch(const Program& program, DType dtype, std::int64_t rows,
                         std::int64_t columns);

/// Appends out_i = first_i where mask_i, else second_i, of tensors [m, columns] by their places;
/// one that is not there has zeros.
void append_select(Program& program, const Problem& problem, const DeviceFacts& facts,
                   std::size_t mask, std::optional<std::size_t> first,
                   std::optional<std::size_t> second, std::size_t out, std::int64_t columns);

/// Appends out [m, columns] = `sorted` with its rows in the order of the tokens.
void append_restore(Program& program, const Problem& problem, const DeviceFacts& facts,
                    std::size_t mask, std::size_t sorted, std::size_t out, std::int64_t columns);

}  // namespace fftune::masked
