#include <fmt/format.h>

#include "cpu/blas.hpp"
#include "cpu/machine.hpp"
#include "cpu/open.hpp"

namespace fftune {
namespace {

std::string size_text(std::int64_t bytes) {
  return bytes >= 1 << 20 ? fmt::format("{} MiB", bytes >> 20) : fmt::format("{} KiB", bytes >> 10);
}

}  // namespace

DeviceFacts cpu_facts() {
  DeviceFacts facts;
  facts.kind = DeviceKind::cpu;
  facts.arch = vector_isa();
  facts.name = read_cpu_model("/");
  if (facts.name.empty()) facts.name = fmt::format("CPU with {}", facts.arch);
  facts.multiprocessors = usable_cores();
  facts.memory_bytes = read_memory("/", "MemTotal");
  facts.clock_hz = read_clock("/");
  facts.toolkit = blas_version();
  facts.details.emplace_back("BLAS",
                             facts.toolkit.starts_with(no_blas) ? facts.toolkit : blas_file());
  for (const auto& cache : read_caches("/")) {
    facts.details.emplace_back(fmt::format("L{}{} cache", cache.level,
                                           cache.type == "Data"          ? " data"
                                           : cache.type == "Instruction" ? " instruction"
                                                                         : ""),
                               size_text(cache.bytes));
    if (cache.type != "Instruction") facts.l2_bytes = cache.bytes;
  }
  return facts;
}

}  // namespace fftune
