// A program: what one variant does on a device, as data. Families write it, backends run it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "core/dtype.hpp"

namespace fftune {

struct Dim3 {
  std::uint32_t x = 1;
  std::uint32_t y = 1;
  std::uint32_t z = 1;
};

/// A kernel to compile: an embedded source file and the template instance in it to lower.
struct KernelSource {
  std::string file;        // name among the embedded sources: "ffn/gate_up_sm80.cu"
  std::string expression;  // NVRTC name expression: "gate_up_sm80<bf16, 128, 64>"
};

/// The address of one of the op's tensors, by its place in Op::tensors().
struct TensorArgument {
  std::size_t tensor = 0;
};

/// The address of one of the program's scratch areas, by its place in Program::scratch.
struct ScratchArgument {
  std::size_t scratch = 0;
};

using Pointer = std::variant<TensorArgument, ScratchArgument>;
using Argument = std::variant<TensorArgument, ScratchArgument, std::int32_t, std::int64_t, float>;

/// Device memory that lives for one run, 256-byte aligned.
struct Scratch {
  std::size_t bytes = 0;
  bool zeroed = false;  // cleared at the start of every run, at the cost of one more launch
};

struct KernelLaunch {
  std::size_t kernel = 0;  // index into Program::kernels
  Dim3 grid;
  Dim3 block;
  Dim3 cluster;
  std::uint32_t shared_bytes = 0;   // dynamic shared memory
  std::vector<Argument> arguments;  // in the order of the kernel's parameters
};

/// c [m,n] = a [m,k] · b [n,k]ᵀ, row-major, fp32 accumulation, by the vendor's BLAS with all the
/// device's resources. What a user would call; used by baselines and to measure the ceiling.
struct LibraryGemm {
  DType dtype = DType::f32;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  Pointer a;
  Pointer b;
  Pointer c;
};

/// Runs a task on several threads of the CPU.
class Parallel {
 public:
  virtual ~Parallel() = default;
  virtual int max_threads() const = 0;
  /// Calls body(i) once for each i in [0, tasks) on at most `threads` threads, and returns when
  /// all are done. Tasks are taken in order, so equal ones balance.
  virtual void run(int tasks, int threads, const std::function<void(int)>& body) = 0;
};

struct HostCall {
  void* const* tensors;             // the op's tensors, in the order of Op::tensors()
  std::vector<std::byte*> scratch;  // in the order of Program::scratch
  Parallel& parallel;
};
using HostFunction = std::function<void(const HostCall&)>;

using Step = std::variant<KernelLaunch, LibraryGemm, HostFunction>;

struct Program {
  std::vector<KernelSource> kernels;
  std::vector<Scratch> scratch;
  std::vector<Step> steps;  // in order, each after the one before is complete
};

}  // namespace fftune
