// A vendor library opened at run time, so that one binary runs on a machine without it.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace fftune::cuda {

class SharedLibrary {
 public:
  /// Opens a soname, which the loader searches, or a path; nothing if that fails.
  static std::optional<SharedLibrary> open(const std::string& candidate);

  /// The address of a symbol, or null.
  void* find(const char* symbol) const;
  /// Puts the address of `symbol` into `function`; throws Error(unavailable) if there is none.
  template <typename Function>
  void load(Function& function, const char* symbol) const {
    function = reinterpret_cast<Function>(require(symbol));
  }

  /// The file behind it, links resolved: ".../libcuda.so.580.159.03".
  std::filesystem::path path() const;

 private:
  SharedLibrary(void* handle, std::string name) : handle_(handle), name_(std::move(name)) {}
  void* require(const char* symbol) const;

  // Never closed: the vendor's libraries keep threads and exit handlers of their own.
  void* handle_;
  std::string name_;
};

/// Where a library of the CUDA toolkit may be: the loader's paths, then below each of `folders`
/// (a toolkit's root, or a folder of libraries), then /usr/local/cuda.
std::vector<std::string> library_candidates(const std::vector<std::string>& sonames,
                                            const std::vector<std::filesystem::path>& folders);

}  // namespace fftune::cuda
