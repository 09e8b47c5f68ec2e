#include "cuda/shared_library.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include <system_error>

#include "core/error.hpp"

namespace fftune::cuda {

std::optional<SharedLibrary> SharedLibrary::open(const std::string& candidate) {
  void* handle = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) return std::nullopt;
  return SharedLibrary(handle, candidate);
}

void* SharedLibrary::find(const char* symbol) const {
  return dlsym(handle_, symbol);
}

void* SharedLibrary::require(const char* symbol) const {
  void* address = find(symbol);
  if (address == nullptr)
    throw Error(ErrorKind::unavailable,
                fmt::format("CUDA: {} has no {}: it is too old, update it", name_, symbol));
  return address;
}

std::filesystem::path SharedLibrary::path() const {
  link_map* map = nullptr;
  if (dlinfo(handle_, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return name_;
  std::error_code error;
  const auto path = std::filesystem::canonical(map->l_name, error);
  return error ? std::filesystem::path(map->l_name) : path;
}

std::vector<std::string> library_candidates(const std::vector<std::string>& sonames,
                                            const std::vector<std::filesystem::path>& folders) {
  std::vector<std::string> candidates = sonames;
  auto roots = folders;
  roots.emplace_back("/usr/local/cuda");
  for (const auto& root : roots)
    for (const char* below :
         {"lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", ""})
      for (const auto& soname : sonames) {
        std::error_code error;
        const auto path = root / below / soname;
        if (std::filesystem::is_regular_file(path, error)) candidates.push_back(path.string());
      }
  return candidates;
}

}  // namespace fftune::cuda
