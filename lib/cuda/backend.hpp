// The CUDA backend: one device's primary context.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda/context.hpp"
#include "cuda/cublaslt.hpp"
#include "cuda/gemm.hpp"
#include "cuda/kernel_compiler.hpp"
#include "cuda/kernel_pool.hpp"
#include "cuda/nccl.hpp"
#include "cuda/nvml.hpp"
#include "cuda/open.hpp"
#include "cuda/session.hpp"
#include "device/backend.hpp"

namespace fftune::cuda {

/// Every call makes the context current for the calling thread and restores the one before, so that
/// it can live in a process with others.
class CudaBackend final : public Backend {
 public:
  CudaBackend(SharedContext context, KernelOrigins origins, DeviceFacts facts,
              const SourceSet& sources, CudaOptions options);
  ~CudaBackend() override;

  const DeviceFacts& facts() const override { return facts_; }
  std::vector<std::string> warnings() const override { return compiler_.warnings(); }
  CompileResult compile(const Program& program) override;
  CompileResult bind(const Program& program) override;
  std::size_t workspace_bytes(const Program& program) const override;
  CompileCounters counters() const override { return compiler_.counters(); }
  std::size_t free_bytes() const override;
  std::unique_ptr<Buffer> allocate(std::size_t bytes) override;
  std::unique_ptr<SharedBuffer> allocate_shared(std::size_t bytes) override;
  std::unique_ptr<Buffer> open_shared(const SharedHandle& handle, std::size_t bytes) override;
  CommunicatorOptions::Id communicator_id() override;
  std::unique_ptr<Communicator> communicate(const CommunicatorOptions& options) override;
  void write(void* device, const void* host, std::size_t bytes) override;
  void read(void* host, const void* device, std::size_t bytes) override;
  void copy(void* to, const void* from, std::size_t bytes) override;
  void fill(void* device, std::uint8_t byte, std::size_t bytes) override;
  void* stream() override { return session_->stream(); }
  void synchronize() override;
  bool multiply(const DoubleProduct& product) override;
  std::unique_ptr<Replay> capture(
      int passes, const std::function<void(int pass, void* stream)>& enqueue) override;
  std::vector<std::string> disturbances() override;
  Limits limits(DType dtype) override;

 private:
  struct Parts;
  /// Fills `parts`; returns why that fails.
  std::string load_kernels(const Program& program, Parts& parts);
  std::string plan_products(const Program& program, AlgorithmChoice choice, Parts& parts);
  CompileResult make_executable(const Program& program, AlgorithmChoice choice);
  std::shared_ptr<const CublasLt> cublaslt();
  std::shared_ptr<const Nccl> nccl();

  SharedContext context_;
  DeviceFacts facts_;
  CudaOptions options_;
  KernelCompiler compiler_;
  KernelPool pool_;
  std::shared_ptr<const Session> session_;
  std::mutex products_mutex_;  // algorithms and ceilings are timed one at a time
  std::shared_ptr<const CublasLt> cublaslt_;
  std::shared_ptr<const Nccl> nccl_;
  std::map<DType, Limits> limits_;
  std::optional<Nvml> nvml_;
};

}  // namespace fftune::cuda
