// NVRTC, the run-time compiler: libnvrtc, opened at run time. Needs neither driver nor GPU.
#pragma once

#include <nvrtc.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fftune::cuda {

/// Each member is the nvrtc function of that name.
struct Nvrtc {
  decltype(&::nvrtcVersion) version_of;
  decltype(&::nvrtcGetErrorString) error_string;
  decltype(&::nvrtcGetNumSupportedArchs) num_supported_archs;
  decltype(&::nvrtcGetSupportedArchs) supported_archs;
  decltype(&::nvrtcCreateProgram) create_program;
  decltype(&::nvrtcDestroyProgram) destroy_program;
  decltype(&::nvrtcAddNameExpression) add_name_expression;
  decltype(&::nvrtcCompileProgram) compile_program;
  decltype(&::nvrtcGetProgramLogSize) program_log_size;
  decltype(&::nvrtcGetProgramLog) program_log;
  decltype(&::nvrtcGetLoweredName) lowered_name;
  decltype(&::nvrtcGetCUBINSize) cubin_size;
  decltype(&::nvrtcGetCUBIN) cubin;

  int major = 0;
  int minor = 0;

  std::string version() const;  // "13.0"
  /// Whether it compiles for "sm_90a".
  bool supports(const std::string& arch) const;
};

/// NVRTC that is opened when it is first needed. Any thread may ask for it.
class LazyNvrtc {
 public:
  using Open = std::function<std::shared_ptr<const Nvrtc>()>;

  explicit LazyNvrtc(Open open) : open_(std::move(open)) {}
  /// Throws what `open` throws.
  std::shared_ptr<const Nvrtc> get();

 private:
  std::mutex mutex_;
  Open open_;
  std::shared_ptr<const Nvrtc> opened_;
};

/// Takes the first libnvrtc of 12.4 or newer, looking where the loader does and below `folders`;
/// not one of a major version past `newest_major`, whose kernels the driver could not load. Throws
/// Error(unavailable) saying what was found and what to install.
std::shared_ptr<const Nvrtc> open_nvrtc(const std::vector<std::filesystem::path>& folders,
                                        std::optional<int> newest_major = std::nullopt);

/// The same over given names or paths of libraries.
std::shared_ptr<const Nvrtc> open_nvrtc_among(const std::vector<std::string>& candidates,
                                              std::optional<int> newest_major);

}  // namespace fftune::cuda
