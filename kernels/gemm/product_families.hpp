// The families of the engines, for any stage that is a Product. What differs between two stages is
// the name, and what product it is; a string literal each, as the names are.
#pragma once

#include "kernels/gemm/product.hpp"
#include "registry/family.hpp"

namespace fftune {

class ProductFamily : public Family {
 public:
  ProductFamily(const ProductStage& stage, std::string_view name, std::string_view summary)
      : stage_(stage), name_(name), summary_(summary) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  std::vector<std::string> stages() const override { return {std::string(stage_.name)}; }

 protected:
  const ProductStage& stage() const { return stage_; }
  Product product(const Problem& problem) const { return stage_.product(problem); }

 private:
  ProductStage stage_;
  std::string_view name_;
  std::string_view summary_;
};

/// gemm/wgmma_gemm.cuh, for compute capability 9.0.
class WgmmaProduct final : public ProductFamily {
 public:
  using ProductFamily::ProductFamily;
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  std::optional<double> estimate(const Problem&, const DeviceFacts&, const Config&) const override;
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override;
};

/// gemm/mma_sync.cuh, for compute capability 8.0 and newer.
class MmaSyncProduct final : public ProductFamily {
 public:
  MmaSyncProduct(const ProductStage& stage, std::string_view name)
      : ProductFamily(stage, name, "mma.sync and cp.async, transposed operands by ldmatrix.trans") {
  }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  std::optional<double> estimate(const Problem&, const DeviceFacts&, const Config&) const override;
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override;
};

/// gemm/decode.cuh, for up to 16 rows of a, and b as it is: one sum of a forward pass.
class DecodeProduct final : public ProductFamily {
 public:
  DecodeProduct(const ProductStage& stage, std::string_view name)
      : ProductFamily(stage, name, "up to 16 tokens, at the speed of reading the weights once") {}
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override;
};

/// gemm/fallback.cuh, for any CUDA device, size and type.
class FallbackProduct final : public ProductFamily {
 public:
  FallbackProduct(const ProductStage& stage, std::string_view name)
      : ProductFamily(stage, name, "any sizes, alignment and type: the fallback") {}
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  bool is_fallback() const override { return true; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override;
};

/// Blocks over OpenBLAS, on the CPU.
class CpuBlasProduct final : public ProductFamily {
 public:
  CpuBlasProduct(const ProductStage& stage, std::string_view name)
      : ProductFamily(stage, name, "blocks over OpenBLAS, each finished where it is made") {}
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override;
};

/// Plain loops, on the CPU.
class CpuPlainProduct final : public ProductFamily {
 public:
  CpuPlainProduct(const ProductStage& stage, std::string_view name)
      : ProductFamily(stage, name, "plain loops for any sizes: the fallback") {}
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  bool is_fallback() const override { return true; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override;
};

}  // namespace fftune
