// How the memory-bound ops divide rows among a CPU's threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.hpp"
#include "device/program.hpp"
#include "kernels/common/stage_family.hpp"

namespace fftune {

/// 1, 2, 4, ... and every core.
std::vector<std::int64_t> thread_counts(const DeviceFacts& facts);

/// The largest of the counts that is at most `most`; the first where none is.
std::int64_t threads_up_to(std::int64_t most, const std::vector<std::int64_t>& counts);

/// Threads for rows whose largest tensor has `row_bytes` a row: at least 256 KB a thread, because
/// below that waking a thread takes longer than its work.
std::int64_t default_threads(std::int64_t rows, std::int64_t row_bytes, const DeviceFacts& facts);

/// The rows that a family processes.
struct RowWork {
  std::int64_t rows = 0;
  std::int64_t row_bytes = 0;  // of the largest tensor
  bool sums = false;           // over rows: each part of them is one task with sums of its own
  bool nontemporal = true;     // results can be written by non-temporal stores
};

/// A family of the CPU with parameters for the division of rows: `rows` and `threads`, or where
/// rows are summed `threads` and `parts`; and `nontemporal`. It is its stage's fallback.
///
/// By default tasks are of about 64 KB: long compared with the cost of claiming one, and short
/// compared with all of the work. There is one part for each thread, because threads are equal.
/// Stores are non-temporal if results would leave the caches before they are read.
class CpuRowFamily : public StageFamily {
 public:
  CpuRowFamily(StageFamilyFacts facts, RowWork (*work)(const Problem&));
  Space space(const Problem& problem, const DeviceFacts& facts) const override;
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override;

 private:
  RowWork (*work_)(const Problem&);
};

struct CpuRowFunctions {
  RowWork (*work)(const Problem&) = nullptr;
  Program (*program)(const Problem&, const DeviceFacts&, const Config&) = nullptr;
};
/// The families of both passes.
std::vector<CpuRowFamily> cpu_row_families(OfPasses names, std::string_view summary,
                                           const std::vector<std::string>& sources,
                                           CpuRowFunctions functions,
                                           OfPasses stages = {stage_forward, stage_backward});

/// A configuration of independent rows.
struct RowTasks {
  RowTasks(const RowWork& work, const Config& config);

  /// Calls row(index) for every row. Each task has a copy of `row`, and calls `fence` at its end
  /// if stores are non-temporal.
  template <class Row>
  void run(Parallel& parallel, void (*fence)(), const Row& row) const {
    parallel.run(static_cast<int>((rows + of_task - 1) / of_task), threads, [&](int task) {
      Row own = row;
      const std::int64_t last = std::min(rows, (task + 1) * of_task);
      for (std::int64_t index = task * of_task; index < last; ++index) own(index);
      if (nontemporal) fence();
    });
  }

  std::int64_t rows = 0;
  std::int64_t of_task = 1;
  int threads = 1;
  bool nontemporal = false;
};

/// A configuration of rows that are summed.
struct RowParts {
  RowParts(const RowWork& work, const Config& config);

  /// Room for the sums of all parts, [parts, columns].
  Scratch scratch(std::int64_t columns) const {
    return {static_cast<std::size_t>(parts * columns) * sizeof(float), false};
  }
  /// Calls row(index, sums) for every row, where sums [columns] are the part's own and begin as
  /// zeros; then out [columns] of `dtype` = the sum of the parts' sums, in their order.
  template <class Row>
  void run(const HostCall& call, void (*fence)(), std::byte* scratch, std::int64_t columns,
           DType dtype, void* out, const Row& row) const {
    auto* const partial = reinterpret_cast<float*>(scratch);
    call.parallel.run(static_cast<int>(parts), threads, [&](int part) {
      float* const sums = partial + part * columns;
      std::fill_n(sums, columns, 0.0f);
      for (std::int64_t index = first_row(part); index < first_row(part + 1); ++index)
        row(index, sums);
      if (nontemporal) fence();
    });
    add(call.parallel, partial, columns, dtype, out);
  }

  std::int64_t rows = 0;
  std::int64_t parts = 1;
  int threads = 1;
  bool nontemporal = false;

 private:
  /// Parts differ by one row at most.
  std::int64_t first_row(std::int64_t part) const {
    return rows / parts * part + std::min(part, rows % parts);
  }
  void add(Parallel& parallel, const float* partial, std::int64_t columns, DType dtype,
           void* out) const;
};

}  // namespace fftune
