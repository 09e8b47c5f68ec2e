// A compiled program, laid out so that enqueueing it is little more than the driver's launches.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "cuda/context.hpp"
#include "cuda/driver.hpp"
#include "cuda/gemm.hpp"
#include "cuda/kernel_pool.hpp"
#include "cuda/session.hpp"
#include "device/backend.hpp"
#include "device/program.hpp"

namespace fftune::cuda {

/// Where a program's scratch areas lie in its workspace: the zeroed ones first, so that one fill
/// clears them all, then the others, then the vendor library's.
struct WorkspaceLayout {
  explicit WorkspaceLayout(const Program& program);

  std::vector<std::size_t> offsets;  // in the order of Program::scratch
  std::size_t zeroed_bytes = 0;
  bool left_zero = true;  // all of the zeroed ones
  std::size_t library_offset = 0;
  std::size_t bytes = 0;
};

class CudaExecutable final : public Executable {
 public:
  /// Throws Error(unavailable) if the driver refuses a kernel's attributes, Error(internal) for a
  /// program that contradicts itself. `gemms` are the program's LibraryGemm steps in order.
  CudaExecutable(std::shared_ptr<const Session> session, const Program& program,
                 std::vector<std::shared_ptr<const LoadedKernel>> kernels,
                 std::vector<std::unique_ptr<const GemmPlan>> gemms, CompileReport report);

  const CompileReport& report() const override { return report_; }
  std::size_t workspace_bytes() const override { return layout_.bytes; }
  void enqueue(void* const* tensors, void* workspace, void* stream) const override {
    enqueue_steps(tensors, workspace, stream, true);
  }
  void enqueue_again(void* const* tensors, void* workspace, void* stream) const override {
    enqueue_steps(tensors, workspace, stream, !layout_.left_zero);
  }

 private:
  /// CUDA's own limit since 12.1, for compute capability 7.0 and newer.
  static constexpr std::size_t most_parameter_bytes = 32764, most_parameters = 48;

  struct Value {
    enum class Kind : std::uint8_t { constant, tensor, workspace } kind = Kind::constant;
    std::uint64_t number = 0;  // the bits, the tensor's place, or the offset in the workspace
    std::uint64_t offset = 0;  // in the tensor
  };
  /// An address that each run writes into the parameters.
  struct Patch {
    std::size_t offset = 0;
    Value address;
    std::uint64_t shift = 0;  // added to the address
  };
  struct Launch {
    CUfunction function = nullptr;
    CUlaunchConfig config{};
    std::array<CUlaunchAttribute, 3> attributes{};
    std::vector<std::byte> image;         // of all parameters, with placeholders for addresses
    std::vector<std::size_t> parameters;  // where each begins
    std::vector<Patch> pointers;
    std::vector<Patch> maps;  // tensor maps, encoded for a placeholder's address
    const char* name = nullptr;
  };
  struct Product {
    const GemmPlan* plan = nullptr;
    Value a, b, c, a_scale, b_scale;
  };
  struct Sum {
    Value x, y, group;
    std::size_t elements = 0;
    DType dtype = DType::f32;
  };

  Launch prepare(const KernelLaunch& launch) const;
  Product prepare(const LibraryGemm& gemm, const GemmPlan& plan) const;
  Sum prepare(const LibrarySum& sum) const;
  Value prepare(const Argument& argument) const;
  void place_parameters(Launch& prepared, const KernelLaunch& launch) const;
  /// Writes an argument into the image at `offset`, and notes what a run has to patch there.
  void place(Launch& launch, std::size_t offset, const Argument& argument) const;
  static std::uint64_t resolve(const Value& value, void* const* tensors, std::uint64_t workspace);
  CUresult start(const Launch& launch, void** addresses, CUstream stream) const;
  void enqueue_steps(void* const* tensors, void* workspace, void* stream, bool clears) const;
  void enqueue_launch(const Launch& launch, void* const* tensors, std::uint64_t workspace,
                      CUstream stream) const;

  std::shared_ptr<const Session> session_;
  WorkspaceLayout layout_;
  std::vector<std::shared_ptr<const LoadedKernel>> kernels_;
  std::vector<std::unique_ptr<const GemmPlan>> gemms_;
  std::vector<std::variant<Launch, Product, Sum>> steps_;
  CompileReport report_;
};

// Tensor maps (TMA descriptors): how TMA addresses a matrix.

/// The map of `argument`'s matrix at `address` (16-byte aligned). Throws Error(unavailable) if the
/// driver does not take its shape.
CUtensorMap encode_tensor_map(const Driver& driver, const TensorMapArgument& argument,
                              void* address);

}  // namespace fftune::cuda
