#include "kernels/common/cpu_task.hpp"

#include <algorithm>
#include <cstddef>

namespace fftune {
namespace {

std::int64_t streams_by_default(std::int64_t rows, std::int64_t row_bytes,
                                const DeviceFacts& facts) {
  return rows * row_bytes > facts.l2_bytes ? 1 : 0;
}

}  // namespace

std::vector<std::int64_t> thread_counts(const DeviceFacts& facts) {
  std::vector<std::int64_t> counts;
  for (std::int64_t count = 1; count < facts.multiprocessors; count *= 2) counts.push_back(count);
  counts.push_back(facts.multiprocessors);
  return counts;
}

std::int64_t default_threads(std::int64_t rows, std::int64_t row_bytes, const DeviceFacts& facts) {
  const std::int64_t most = std::min(rows, rows * row_bytes >> 18);
  std::int64_t threads = 1;
  for (const std::int64_t count : thread_counts(facts))
    if (count <= most) threads = count;
  return threads;
}

Space task_space(std::int64_t rows, const DeviceFacts& facts) {
  return Space()
      .parameter("rows", "rows of a task", {1, 4, 16, 64, 256})
      .parameter("threads", "threads at most", thread_counts(facts))
      .constraint("a task has no more rows than there are",
                  [rows](const Config& c) { return c.at("rows") == 1 || c.at("rows") <= rows; },
                  {"rows"})
      .constraint("no more threads than tasks",
                  [rows](const Config& c) {
                    return c.at("threads") == 1 || (c.at("threads") - 1) * c.at("rows") < rows;
                  },
                  {"rows", "threads"});
}

Config default_task(std::int64_t rows, std::int64_t row_bytes, const DeviceFacts& facts) {
  const std::int64_t threads = default_threads(rows, row_bytes, facts);
  std::int64_t of_task = 1;
  while (of_task < 256 && of_task * row_bytes < 65536 && 4 * of_task * threads <= rows)
    of_task *= 4;
  return {{"rows", of_task}, {"threads", threads}};
}

Space row_task_space(std::int64_t rows, const DeviceFacts& facts) {
  return task_space(rows, facts)
      .parameter("nontemporal",
                 "1: results are written by non-temporal stores; 0: by ordinary ones", {0, 1});
}

Config default_row_task(std::int64_t rows, std::int64_t row_bytes, const DeviceFacts& facts) {
  Config config = default_task(rows, row_bytes, facts);
  config.set("nontemporal", streams_by_default(rows, row_bytes, facts));
  return config;
}

Space row_part_space(std::int64_t rows, const DeviceFacts& facts) {
  return Space()
      .parameter("threads", "threads at most", thread_counts(facts))
      .parameter("parts", "parts of the rows for each thread", {1, 2, 4})
      .parameter("nontemporal",
                 "1: results are written by non-temporal stores; 0: by ordinary ones", {0, 1})
      .constraint("every part has a row",
                  [rows](const Config& c) { return c.at("threads") * c.at("parts") <= rows; },
                  {"threads", "parts"});
}

Config default_row_part(std::int64_t rows, std::int64_t row_bytes, const DeviceFacts& facts) {
  return {{"threads", default_threads(rows, row_bytes, facts)},
          {"parts", 1},
          {"nontemporal", streams_by_default(rows, row_bytes, facts)}};
}

std::int64_t first_row_of_part(std::int64_t rows, std::int64_t parts, std::int64_t part) {
  return rows / parts * part + std::min(part, rows % parts);
}

void add_parts(Parallel& parallel, int threads, const float* partial, std::int64_t parts,
               std::int64_t columns, DType dtype, void* out) {
  constexpr std::int64_t of_task = 1024;
  const auto tasks = static_cast<int>((columns + of_task - 1) / of_task);
  parallel.run(tasks, threads, [&](int task) {
    const std::int64_t begin = task * of_task;
    const auto count = static_cast<std::size_t>(std::min(of_task, columns - begin));
    float sum[of_task] = {};
    for (std::int64_t part = 0; part < parts; ++part) {
      const float* const row = partial + part * columns + begin;
      for (std::size_t i = 0; i < count; ++i) sum[i] += row[i];
    }
    encode(dtype, {sum, count},
           static_cast<std::byte*>(out) + static_cast<std::size_t>(begin) * dtype_bytes(dtype));
  });
}

}  // namespace fftune
