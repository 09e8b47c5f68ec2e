#include "device/facts.hpp"

#include <fmt/format.h>

#include <array>
#include <cctype>

#include "core/error.hpp"

namespace fftune {
namespace {

struct Architecture {
  const char* arch;
  const char* product;
  int compute_capability;
  int multiprocessors;
  int shared_kib_per_block;
  int shared_kib_per_multiprocessor;
  int l2_mib;
  int memory_gib;
  double terabytes_per_second;
  double clock_ghz;
};

// Shared memory: CUDA C++ Programming Guide, technical specifications per compute capability.
// The rest: the vendor's datasheet of the product.
constexpr std::array architectures{
    Architecture{"sm_80", "NVIDIA A100-SXM4-80GB", 80, 108, 163, 164, 40, 80, 2.039, 1.41},
    Architecture{"sm_86", "NVIDIA GeForce RTX 3090", 86, 82, 99, 100, 6, 24, 0.936, 1.695},
    Architecture{"sm_89", "NVIDIA GeForce RTX 4090", 89, 128, 99, 100, 72, 24, 1.008, 2.52},
    Architecture{"sm_90a", "NVIDIA H100 80GB HBM3", 90, 132, 227, 228, 50, 80, 3.35, 1.98},
    Architecture{"sm_100a", "NVIDIA B200", 100, 148, 227, 228, 126, 180, 8.0, 1.965},
    Architecture{"sm_120a", "NVIDIA GeForce RTX 5090", 120, 170, 99, 100, 96, 32, 1.792, 2.407},
};

}  // namespace

std::string slug_of(std::string_view name) {
  std::string slug;
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte))
      slug += static_cast<char>(std::tolower(byte));
    else if (!slug.empty() && slug.back() != '-')
      slug += '-';
  }
  if (!slug.empty() && slug.back() == '-') slug.pop_back();
  return slug.empty() ? "unknown" : slug;
}

std::string DeviceFacts::slug() const {
  if (kind == DeviceKind::cuda) return slug_of(name);
  return fmt::format("{}-on-{}-core{}", slug_of(name), multiprocessors,
                     multiprocessors == 1 ? "" : "s");
}

DeviceFacts facts_of_architecture(std::string_view arch) {
  for (const auto& known : architectures) {
    if (arch != known.arch) continue;
    DeviceFacts facts;
    facts.kind = DeviceKind::cuda;
    facts.name = known.product;
    facts.arch = known.arch;
    facts.compute_capability = known.compute_capability;
    facts.multiprocessors = known.multiprocessors;
    facts.registers_per_multiprocessor = 65536;
    facts.shared_bytes_per_block = std::int64_t{known.shared_kib_per_block} << 10;
    facts.shared_bytes_per_multiprocessor = std::int64_t{known.shared_kib_per_multiprocessor} << 10;
    facts.l2_bytes = std::int64_t{known.l2_mib} << 20;
    facts.memory_bytes = std::int64_t{known.memory_gib} << 30;
    facts.memory_bandwidth = known.terabytes_per_second * 1e12;
    facts.clock_hz = known.clock_ghz * 1e9;
    return facts;
  }
  throw Error(ErrorKind::invalid_input, fmt::format("unknown architecture '{}': use one of {}",
                                                    arch, fmt::join(known_architectures(), ", ")));
}

std::vector<std::string> known_architectures() {
  std::vector<std::string> names;
  for (const auto& known : architectures) names.emplace_back(known.arch);
  return names;
}

}  // namespace fftune
