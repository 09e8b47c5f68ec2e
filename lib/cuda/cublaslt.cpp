#include "cuda/cublaslt.hpp"

#include <fmt/format.h>

#include "core/error.hpp"
#include "cuda/shared_library.hpp"

namespace fftune::cuda {

CublasLt::CublasLt(SharedContext context, const std::vector<std::filesystem::path>& folders)
    : CublasLt(std::move(context),
               library_candidates({"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"},
                                  folders)) {}

CublasLt::CublasLt(SharedContext context, const std::vector<std::string>& candidates)
    : context_(std::move(context)) {
  std::optional<SharedLibrary> library;
  for (const auto& candidate : candidates)
    if ((library = SharedLibrary::open(candidate))) break;
  if (!library)
    throw Error(ErrorKind::unavailable,
                "cuBLASLt is not there: install the CUDA Toolkit's libcublas package, 12 or 13, or "
                "set CUDA_HOME to a toolkit");
  library->load(create_, "cublasLtCreate");
  library->load(destroy_, "cublasLtDestroy");
  library->load(get_version_, "cublasLtGetVersion");
  library->load(status_string_, "cublasLtGetStatusString");
  library->load(matmul, "cublasLtMatmul");
  library->load(desc_create, "cublasLtMatmulDescCreate");
  library->load(desc_destroy, "cublasLtMatmulDescDestroy");
  library->load(desc_set, "cublasLtMatmulDescSetAttribute");
  library->load(layout_create, "cublasLtMatrixLayoutCreate");
  library->load(layout_set, "cublasLtMatrixLayoutSetAttribute");
  library->load(layout_destroy, "cublasLtMatrixLayoutDestroy");
  library->load(preference_create, "cublasLtMatmulPreferenceCreate");
  library->load(preference_destroy, "cublasLtMatmulPreferenceDestroy");
  library->load(preference_set, "cublasLtMatmulPreferenceSetAttribute");
  library->load(heuristic, "cublasLtMatmulAlgoGetHeuristic");
  check(create_(&handle_), "cublasLtCreate");
}

CublasLt::~CublasLt() {
  if (handle_ == nullptr) return;
  const Current current(*context_);
  destroy_(handle_);
}

std::string CublasLt::version() const {
  const auto version = get_version_();  // 130002 is 13.0.2 since 12.0; 120400 the same way
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

void CublasLt::check(cublasStatus_t status, const char* what) const {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(ErrorKind::unavailable,
                fmt::format("cuBLASLt: {}: {}", what, status_string_(status)));
}

}  // namespace fftune::cuda
