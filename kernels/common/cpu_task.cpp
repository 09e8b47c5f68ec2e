#include "kernels/common/cpu_task.hpp"

#include <cstddef>
#include <utility>

namespace fftune {

std::vector<std::int64_t> thread_counts(const DeviceFacts& facts) {
  std::vector<std::int64_t> counts;
  for (std::int64_t count = 1; count < facts.multiprocessors; count *= 2) counts.push_back(count);
  counts.push_back(facts.multiprocessors);
  return counts;
}

std::int64_t threads_up_to(std::int64_t most, const std::vector<std::int64_t>& counts) {
  std::int64_t threads = counts.front();
  for (const std::int64_t count : counts)
    if (count <= most) threads = count;
  return threads;
}

std::int64_t default_threads(std::int64_t rows, std::int64_t row_bytes, const DeviceFacts& facts) {
  return threads_up_to(std::min(rows, rows * row_bytes >> 18), thread_counts(facts));
}

CpuRowFamily::CpuRowFamily(StageFamilyFacts facts, RowWork (*work)(const Problem&))
    : StageFamily([&] {
        facts.device_kind = DeviceKind::cpu;
        facts.is_fallback = true;
        return std::move(facts);
      }()),
      work_(work) {}

Space CpuRowFamily::space(const Problem& problem, const DeviceFacts& facts) const {
  const RowWork work = work_(problem);
  Space space;
  if (work.sums)
    space.parameter("threads", "threads at most", thread_counts(facts))
        .parameter("parts", "parts of the rows for each thread", {1, 2, 4})
        .constraint(
            "every part has a row",
            [work](const Config& c) { return c.at("threads") * c.at("parts") <= work.rows; },
            {"threads", "parts"});
  else
    space.parameter("rows", "rows of a task", {1, 4, 16, 64, 256})
        .parameter("threads", "threads at most", thread_counts(facts))
        .constraint(
            "a task has no more rows than there are",
            [work](const Config& c) { return c.at("rows") == 1 || c.at("rows") <= work.rows; },
            {"rows"})
        .constraint("no more threads than tasks",
                    [work](const Config& c) {
                      return c.at("threads") == 1 ||
                             (c.at("threads") - 1) * c.at("rows") < work.rows;
                    },
                    {"rows", "threads"});
  if (work.nontemporal)
    space.parameter("nontemporal",
                    "1: results are written by non-temporal stores; 0: by ordinary ones", {0, 1});
  return space;
}

Config CpuRowFamily::default_config(const Problem& problem, const DeviceFacts& facts) const {
  const auto [rows, row_bytes, sums, nontemporal] = work_(problem);
  const std::int64_t threads = default_threads(rows, row_bytes, facts);
  Config config;
  if (sums) {
    config = {{"threads", threads}, {"parts", 1}};
  } else {
    std::int64_t of_task = 1;
    while (of_task < 256 && of_task * row_bytes < 65536 && 4 * of_task * threads <= rows)
      of_task *= 4;
    config = {{"rows", of_task}, {"threads", threads}};
  }
  if (nontemporal) config.set("nontemporal", rows * row_bytes > facts.l2_bytes ? 1 : 0);
  return config;
}

std::vector<CpuRowFamily> cpu_row_families(OfPasses names, std::string_view summary,
                                           const std::vector<std::string>& sources,
                                           CpuRowFunctions functions, OfPasses stages) {
  const auto of = [&](const char* name, const char* stage, const char* pass) {
    return CpuRowFamily({.name = name,
                         .summary = summary,
                         .stage = stage,
                         .pass = pass,
                         .sources = sources,
                         .program = functions.program},
                        functions.work);
  };
  return {of(names.forward, stages.forward, "fwd"), of(names.backward, stages.backward, "bwd")};
}

RowTasks::RowTasks(const RowWork& work, const Config& config)
    : rows(work.rows),
      of_task(config.at("rows")),
      threads(config.get("threads")),
      nontemporal(work.nontemporal && config.at("nontemporal") != 0) {}

RowParts::RowParts(const RowWork& work, const Config& config)
    : rows(work.rows),
      parts(config.at("threads") * config.at("parts")),
      threads(config.get("threads")),
      nontemporal(work.nontemporal && config.at("nontemporal") != 0) {}

void RowParts::add(Parallel& parallel, const float* partial, std::int64_t columns, DType dtype,
                   void* out) const {
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
