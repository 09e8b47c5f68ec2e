#include "cuda/launch_limits.hpp"

#include <fmt/format.h>

#include <cstdint>

namespace fftune::cuda {
namespace {

// CUDA C++ Programming Guide, technical specifications per compute capability: these are the same
// for every one that fftune knows.
constexpr std::uint64_t threads_per_block = 1024;
constexpr std::uint64_t block_depth = 64;
constexpr std::uint64_t grid_width = 0x7fffffff;
constexpr std::uint64_t grid_height = 65535;
constexpr std::uint64_t registers_per_block = 65536;
constexpr std::uint64_t registers_per_warp_unit = 256;  // allocation granularity
constexpr std::uint64_t warp = 32;
constexpr std::uint64_t blocks_per_cluster = 16;  // past 8 it is not portable

std::uint64_t volume(const Dim3& dims) {
  return std::uint64_t{dims.x} * dims.y * dims.z;
}

std::uint64_t rounded_up(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::string text(const Dim3& dims) {
  return fmt::format("{}x{}x{}", dims.x, dims.y, dims.z);
}

}  // namespace

std::string launch_failure(const KernelLaunch& launch, const KernelNeeds& kernel,
                           const DeviceFacts& facts) {
  const auto& [x, y, z] = launch.grid;
  if (x == 0 || y == 0 || z == 0 || x > grid_width || y > grid_height || z > grid_height)
    return fmt::format("a grid of {} blocks: a device takes 1 to {}x{}x{}", text(launch.grid),
                       grid_width, grid_height, grid_height);
  const auto threads = volume(launch.block);
  if (threads == 0 || launch.block.x > threads_per_block || launch.block.y > threads_per_block ||
      launch.block.z > block_depth || threads > threads_per_block)
    return fmt::format("a block of {} threads: a device takes 1 to {}", text(launch.block),
                       threads_per_block);
  const auto registers =
      rounded_up(static_cast<std::uint64_t>(kernel.registers) * warp, registers_per_warp_unit) *
      (rounded_up(threads, warp) / warp);
  if (registers > registers_per_block)
    return fmt::format("{} threads of {} registers: a block has {}", threads, kernel.registers,
                       registers_per_block);
  const auto shared = std::int64_t{launch.shared_bytes} + kernel.static_shared_bytes;
  if (shared > facts.shared_bytes_per_block)
    return fmt::format("{} bytes of shared memory: a block has {}", shared,
                       facts.shared_bytes_per_block);
  if (launch.programmatic && facts.compute_capability < 90)
    return fmt::format("a programmatic dependent launch: {} has none", facts.arch);
  const auto& cluster = launch.cluster;
  if (volume(cluster) == 1) return {};
  if (facts.compute_capability < 90)
    return fmt::format("a cluster of {} blocks: {} has no clusters", text(cluster), facts.arch);
  if (volume(cluster) == 0 || volume(cluster) > blocks_per_cluster)
    return fmt::format("a cluster of {} blocks: a device takes 1 to {}", text(cluster),
                       blocks_per_cluster);
  if (x % cluster.x != 0 || y % cluster.y != 0 || z % cluster.z != 0)
    return fmt::format("a grid of {} blocks is not a multiple of its cluster of {}",
                       text(launch.grid), text(cluster));
  return {};
}

}  // namespace fftune::cuda
