#include "cuda/nvrtc.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "core/error.hpp"
#include "cuda/shared_library.hpp"

namespace fftune::cuda {
namespace {

constexpr int oldest_major = 12;
constexpr int oldest_minor = 4;

void load_entry_points(const SharedLibrary& library, Nvrtc& nvrtc) {
  library.load(nvrtc.error_string, "nvrtcGetErrorString");
  library.load(nvrtc.num_supported_archs, "nvrtcGetNumSupportedArchs");
  library.load(nvrtc.supported_archs, "nvrtcGetSupportedArchs");
  library.load(nvrtc.create_program, "nvrtcCreateProgram");
  library.load(nvrtc.destroy_program, "nvrtcDestroyProgram");
  library.load(nvrtc.add_name_expression, "nvrtcAddNameExpression");
  library.load(nvrtc.compile_program, "nvrtcCompileProgram");
  library.load(nvrtc.program_log_size, "nvrtcGetProgramLogSize");
  library.load(nvrtc.program_log, "nvrtcGetProgramLog");
  library.load(nvrtc.lowered_name, "nvrtcGetLoweredName");
  library.load(nvrtc.cubin_size, "nvrtcGetCUBINSize");
  library.load(nvrtc.cubin, "nvrtcGetCUBIN");
}

}  // namespace

std::string Nvrtc::version() const {
  return fmt::format("{}.{}", major, minor);
}

bool Nvrtc::supports(const std::string& arch) const {
  if (arch.rfind("sm_", 0) != 0) return false;
  std::size_t end = 3;
  int number = 0;
  while (end < arch.size() && end < 7 && std::isdigit(static_cast<unsigned char>(arch[end])))
    number = number * 10 + (arch[end++] - '0');
  const std::string suffix = arch.substr(end);
  if (!suffix.empty() && suffix != "a" && suffix != "f") return false;
  int count = 0;
  if (num_supported_archs(&count) != NVRTC_SUCCESS || count <= 0) return false;
  std::vector<int> known(static_cast<std::size_t>(count));
  if (supported_archs(known.data()) != NVRTC_SUCCESS) return false;
  return std::find(known.begin(), known.end(), number) != known.end();
}

std::shared_ptr<const Nvrtc> LazyNvrtc::get() {
  const std::lock_guard lock(mutex_);
  if (!opened_) opened_ = open_();
  return opened_;
}

std::shared_ptr<const Nvrtc> open_nvrtc_among(const std::vector<std::string>& candidates,
                                              std::optional<int> newest_major) {
  std::string found;
  for (const auto& candidate : candidates) {
    const auto library = SharedLibrary::open(candidate);
    if (!library) continue;
    auto nvrtc = std::make_shared<Nvrtc>();
    nvrtc->version_of =
        reinterpret_cast<decltype(nvrtc->version_of)>(library->find("nvrtcVersion"));
    if (nvrtc->version_of == nullptr ||
        nvrtc->version_of(&nvrtc->major, &nvrtc->minor) != NVRTC_SUCCESS)
      continue;
    const bool old = std::pair(nvrtc->major, nvrtc->minor) < std::pair(oldest_major, oldest_minor);
    const bool new_for_driver = newest_major && nvrtc->major > *newest_major;
    if (old || new_for_driver) {
      found += fmt::format("{}{} is {}{}", found.empty() ? "" : ", ", candidate, nvrtc->version(),
                           old ? "" : ", newer than the driver");
      continue;
    }
    load_entry_points(*library, *nvrtc);
    return nvrtc;
  }
  if (found.empty()) found = "libnvrtc is not there";
  const int major = std::max(oldest_major, newest_major.value_or(13));
  throw Error(ErrorKind::unavailable,
              fmt::format("CUDA: NVRTC, the run-time compiler: {}: install the CUDA Toolkit's "
                          "cuda-nvrtc package, 12.4 or newer{}, or set CUDA_HOME to a toolkit",
                          found, newest_major ? fmt::format(", up to {}.x", major) : ""));
}

std::shared_ptr<const Nvrtc> open_nvrtc(const std::vector<std::filesystem::path>& folders,
                                        std::optional<int> newest_major) {
  return open_nvrtc_among(
      library_candidates({"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}, folders),
      newest_major);
}

}  // namespace fftune::cuda
