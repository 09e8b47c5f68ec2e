// How the memory-bound ops divide rows among a CPU's threads.
#pragma once

#include <cstdint>
#include <vector>

#include "core/dtype.hpp"
#include "core/space.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"

namespace fftune {

/// 1, 2, 4, ... and every core.
std::vector<std::int64_t> thread_counts(const DeviceFacts& facts);

/// Threads for rows whose largest tensor has `row_bytes` a row: at least 256 KB a thread, because
/// below that waking a thread takes longer than its work.
std::int64_t default_threads(std::int64_t rows, std::int64_t row_bytes, const DeviceFacts& facts);

/// Parameters rows and threads of work whose rows are independent, with a default: tasks of about
/// 64 KB, long beside taking one and short beside all of the work.
Space task_space(std::int64_t rows, const DeviceFacts& facts);
Config default_task(std::int64_t rows, std::int64_t row_bytes, const DeviceFacts& facts);

/// The same and nontemporal: non-temporal stores by default if results would leave the caches
/// before they are read.
Space row_task_space(std::int64_t rows, const DeviceFacts& facts);
Config default_row_task(std::int64_t rows, std::int64_t row_bytes, const DeviceFacts& facts);

/// Parameters threads, parts and streams of work that sums over rows: each part of the rows is one
/// task with sums of its own. By default there is one part for each thread: threads are equal.
Space row_part_space(std::int64_t rows, const DeviceFacts& facts);
Config default_row_part(std::int64_t rows, std::int64_t row_bytes, const DeviceFacts& facts);

/// The first row of part `part` of `parts`, which differ by one row at most.
std::int64_t first_row_of_part(std::int64_t rows, std::int64_t parts, std::int64_t part);

/// out [columns] of `dtype` = the sum of the rows of partial [parts, columns], in their order.
void add_parts(Parallel& parallel, int threads, const float* partial, std::int64_t parts,
               std::int64_t columns, DType dtype, void* out);

}  // namespace fftune
