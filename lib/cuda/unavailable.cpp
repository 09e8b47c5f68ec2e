// The CUDA backend of a build without the CUDA toolkit's headers: it says so.
#include "core/error.hpp"
#include "cuda/open.hpp"

namespace fftune {
namespace {

constexpr const char* reason =
    "CUDA: this fftune was built without the CUDA Toolkit's headers: install the CUDA Toolkit 12.4 "
    "or newer and build again";

}  // namespace

CudaDevices list_cuda_devices(const CudaOptions&) {
  return {{}, {reason}};
}

std::unique_ptr<Backend> open_cuda(int, const SourceSet&, const CudaOptions&) {
  throw Error(ErrorKind::unavailable, reason);
}

std::unique_ptr<Compiler> make_cuda_compiler(const std::string&, const SourceSet&,
                                             const CudaOptions&) {
  throw Error(ErrorKind::unavailable, reason);
}

std::unique_ptr<BundleBuilder> make_bundle_builder(const SourceSet&, const CudaOptions&) {
  throw Error(ErrorKind::unavailable, reason);
}

}  // namespace fftune
