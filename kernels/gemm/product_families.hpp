// The families of the engines, for any stage that is a Product.
#pragma once

#include "kernels/common/stage_family.hpp"
#include "kernels/gemm/product.hpp"

namespace fftune {

template <DeviceKind kind>
class ProductFamily : public StageFamily<ProductStage, kind> {
 public:
  using StageFamily<ProductStage, kind>::StageFamily;

 protected:
  Product product(const Problem& problem) const { return this->stage().product(problem); }
};

using CudaProduct = ProductFamily<DeviceKind::cuda>;
using CpuProduct = ProductFamily<DeviceKind::cpu>;

/// gemm/wgmma_gemm.cuh, for compute capability 9.0.
class WgmmaProduct final : public CudaProduct {
 public:
  using ProductFamily::ProductFamily;
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  std::optional<double> estimate(const Problem&, const DeviceFacts&, const Config&) const override;
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override;
};

/// gemm/mma_sync.cuh, for compute capability 8.0 and newer.
class MmaSyncProduct final : public CudaProduct {
 public:
  MmaSyncProduct(const ProductStage& stage, std::string_view name)
      : CudaProduct(stage, name, "mma.sync and cp.async, transposed operands by ldmatrix.trans") {}
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  std::optional<double> estimate(const Problem&, const DeviceFacts&, const Config&) const override;
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override;
};

/// gemm/decode.cuh, for up to 16 rows of a, and b as it is: one sum of a forward pass.
class DecodeProduct final : public CudaProduct {
 public:
  DecodeProduct(const ProductStage& stage, std::string_view name)
      : CudaProduct(stage, name, "up to 16 tokens, at the speed of reading the weights once") {}
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override;
};

/// gemm/fallback.cuh, for any CUDA device, size and type.
class FallbackProduct final : public CudaProduct {
 public:
  FallbackProduct(const ProductStage& stage, std::string_view name)
      : CudaProduct(stage, name, "any sizes, alignment and type: the fallback") {}
  bool is_fallback() const override { return true; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override;
};

/// Blocks over OpenBLAS, on the CPU.
class CpuBlasProduct final : public CpuProduct {
 public:
  CpuBlasProduct(const ProductStage& stage, std::string_view name)
      : CpuProduct(stage, name, "blocks over OpenBLAS, each finished where it is made") {}
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override;
};

/// Plain loops, on the CPU.
class CpuPlainProduct final : public CpuProduct {
 public:
  CpuPlainProduct(const ProductStage& stage, std::string_view name)
      : CpuProduct(stage, name, "plain loops for any sizes: the fallback") {}
  bool is_fallback() const override { return true; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override;
};

}  // namespace fftune
