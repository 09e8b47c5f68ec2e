// cuBLASLt, the vendor's GEMM library: libcublasLt, opened at run time.
#pragma once

#include <cublasLt.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cuda/context.hpp"

namespace fftune::cuda {

/// Each member is the cublasLt function of that name; with the library's handle for one context.
class CublasLt {
 public:
  /// The context must be current. Throws Error(unavailable) saying what to install.
  CublasLt(SharedContext context, const std::vector<std::filesystem::path>& folders);
  /// The same over given names or paths of libraries.
  CublasLt(SharedContext context, const std::vector<std::string>& candidates);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  decltype(&::cublasLtMatmul) matmul;
  decltype(&::cublasLtMatmulDescCreate) desc_create;
  decltype(&::cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&::cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&::cublasLtMatrixLayoutCreate) layout_create;
  decltype(&::cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&::cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&::cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&::cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) heuristic;

  cublasLtHandle_t handle() const { return handle_; }
  std::string version() const;  // "13.0.2"

  /// Throws Error(unavailable) with the library's words unless `status` is success.
  void check(cublasStatus_t status, const char* what) const;

 private:
  SharedContext context_;
  decltype(&::cublasLtCreate) create_;
  decltype(&::cublasLtDestroy) destroy_;
  decltype(&::cublasLtGetVersion) get_version_;
  decltype(&::cublasLtGetStatusString) status_string_;
  cublasLtHandle_t handle_ = nullptr;
};

}  // namespace fftune::cuda
