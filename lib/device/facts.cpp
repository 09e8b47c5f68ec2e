#include "device/facts.hpp"

#include <fmt/format.h>

#include <array>
#include <cctype>

#include "core/error.hpp"

namespace fftune {
namespace {

struct Product {
  const char* arch;
  const char* name;
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
// The rest: the vendor's datasheet of the product, or what its driver says where that is known. The
// first of an architecture represents it.
constexpr std::array products{
    Product{"sm_80", "NVIDIA A100-SXM4-80GB", 80, 108, 163, 164, 40, 80, 2.039, 1.41},
    Product{"sm_80", "NVIDIA A100-SXM4-40GB", 80, 108, 163, 164, 40, 40, 1.555, 1.41},
    Product{"sm_80", "NVIDIA A30", 80, 56, 163, 164, 24, 24, 0.933, 1.44},
    Product{"sm_86", "NVIDIA GeForce RTX 3090", 86, 82, 99, 100, 6, 24, 0.936, 1.695},
    Product{"sm_86", "NVIDIA A10", 86, 72, 99, 100, 6, 24, 0.6, 1.695},
    Product{"sm_89", "NVIDIA GeForce RTX 4090", 89, 128, 99, 100, 72, 24, 1.008, 2.52},
    Product{"sm_89", "NVIDIA L40S", 89, 142, 99, 100, 96, 48, 0.864, 2.52},
    Product{"sm_89", "NVIDIA L4", 89, 58, 99, 100, 48, 24, 0.3, 2.04},
    Product{"sm_90a", "NVIDIA H100 80GB HBM3", 90, 132, 227, 228, 50, 80, 3.35, 1.98},
    Product{"sm_90a", "NVIDIA H100 PCIe", 90, 114, 227, 228, 50, 80, 2.039, 1.755},
    Product{"sm_90a", "NVIDIA H200", 90, 132, 227, 228, 60, 141, 4.814, 1.98},
    Product{"sm_90a", "NVIDIA GH200 480GB", 90, 132, 227, 228, 60, 96, 4.023, 1.98},
    Product{"sm_100a", "NVIDIA B200", 100, 148, 227, 228, 126, 180, 8.0, 1.965},
    Product{"sm_120a", "NVIDIA GeForce RTX 5090", 120, 170, 99, 100, 96, 32, 1.792, 2.407},
};

DeviceFacts facts_of(const Product& product) {
  DeviceFacts facts;
  facts.kind = DeviceKind::cuda;
  facts.name = product.name;
  facts.arch = product.arch;
  facts.compute_capability = product.compute_capability;
  facts.multiprocessors = product.multiprocessors;
  facts.registers_per_multiprocessor = 65536;
  facts.shared_bytes_per_block = std::int64_t{product.shared_kib_per_block} << 10;
  facts.shared_bytes_per_multiprocessor = std::int64_t{product.shared_kib_per_multiprocessor} << 10;
  facts.l2_bytes = std::int64_t{product.l2_mib} << 20;
  facts.memory_bytes = std::int64_t{product.memory_gib} << 30;
  facts.memory_bandwidth = product.terabytes_per_second * 1e12;
  facts.clock_hz = product.clock_ghz * 1e9;
  return facts;
}

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

std::vector<DeviceFacts> products_of_architecture(std::string_view arch) {
  std::vector<DeviceFacts> found;
  for (const auto& product : products)
    if (arch == product.arch) found.push_back(facts_of(product));
  if (found.empty())
    throw Error(ErrorKind::invalid_input,
                fmt::format("unknown architecture '{}': use one of {}", arch,
                            fmt::join(known_architectures(), ", ")));
  return found;
}

DeviceFacts facts_of_architecture(std::string_view arch) {
  return products_of_architecture(arch).front();
}

std::vector<std::string> known_architectures() {
  std::vector<std::string> names;
  for (const auto& product : products)
    if (names.empty() || names.back() != product.arch) names.emplace_back(product.arch);
  return names;
}

}  // namespace fftune
