#include "runtime/devices.hpp"

#include <fmt/format.h>

#include <charconv>
#include <optional>
#include <string_view>

#include "core/error.hpp"
#include "cpu/machine.hpp"
#include "cuda/open.hpp"

namespace fftune {
namespace {

CudaOptions cuda_options(const Environment& environment) {
  return {.cache_folder = environment.cache_folder,
          .toolkit_folders = environment.toolkit_folders,
          .nccl = environment.nccl,
          .bundle = environment.bundle,
          .no_jit = environment.no_jit};
}

/// The caller's options, and the environment's for what they leave open.
CpuOptions cpu_options(CpuOptions options, const Environment& environment) {
  if (options.threads > 0) return options;
  if (!environment.threads_complaint.empty())
    throw Error(ErrorKind::invalid_input, environment.threads_complaint);
  options.threads = environment.threads.value_or(0);
  return options;
}

/// "cpu" is -1, "cuda" is 0, "cuda:3" is 3; nothing for any other word.
std::optional<int> parse_spec(std::string_view spec) {
  if (spec == "cpu") return -1;
  if (spec == "cuda") return 0;
  constexpr std::string_view prefix = "cuda:";
  if (spec.substr(0, prefix.size()) != prefix) return std::nullopt;
  const auto digits = spec.substr(prefix.size());
  int ordinal = 0;
  const char* const end = digits.data() + digits.size();
  const auto [stop, status] = std::from_chars(digits.data(), end, ordinal);
  if (status != std::errc() || stop != end || ordinal < 0) return std::nullopt;
  return ordinal;
}

/// "cuda:0 (NVIDIA H200), cpu (AMD EPYC 7763); CUDA: ...".
std::string what_is_here(const Devices& devices) {
  std::string text;
  for (const auto& listing : devices.found)
    text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", listing.spec, listing.facts.name);
  for (const auto& reason : devices.unavailable) text += "; " + reason;
  return text;
}

}  // namespace

Devices list_devices(const Environment& environment) {
  const CudaDevices cuda = list_cuda_devices(cuda_options(environment));
  Devices devices;
  for (std::size_t i = 0; i < cuda.found.size(); ++i)
    devices.found.push_back({fmt::format("cuda:{}", i), cuda.found[i]});
  devices.found.push_back({"cpu", cpu_facts()});
  devices.unavailable = cuda.unavailable;
  return devices;
}

std::string default_device(const Environment& environment) {
  return list_devices(environment).found.front().spec;
}

std::unique_ptr<Backend> open_device(const std::string& spec, const SourceSet& sources,
                                     const Environment& environment, const CpuOptions& cpu) {
  const auto ordinal = parse_spec(spec);
  if (!ordinal)
    throw Error(ErrorKind::invalid_input, fmt::format("'{}' is not a device: there is {}", spec,
                                                      what_is_here(list_devices(environment))));
  if (*ordinal < 0) return open_cpu(cpu_options(cpu, environment));
  const Devices devices = list_devices(environment);
  if (static_cast<std::size_t>(*ordinal) + 1 >= devices.found.size())
    throw Error(ErrorKind::unavailable,
                fmt::format("device '{}' is not here: there is {}", spec, what_is_here(devices)));
  return open_cuda(*ordinal, sources, cuda_options(environment));
}

std::size_t free_host_bytes() {
  return static_cast<std::size_t>(available_bytes());
}

}  // namespace fftune
