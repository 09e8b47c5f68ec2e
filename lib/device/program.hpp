// A program: the work of one variant on a device, as data. Families write it, backends run it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
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
  std::string file;        // name among the embedded sources: "gemm/sm80/gemm.cu"
  std::string expression;  // NVRTC name expression: "fftune::sm80_gemm<form, config>"
};

/// The address of one of the op's tensors, by its place in Op::tensors(), plus an offset in bytes.
struct TensorArgument {
  std::size_t tensor = 0;
  std::size_t offset = 0;
};

/// The same of one of the program's scratch areas, by its place in Program::scratch.
struct ScratchArgument {
  std::size_t scratch = 0;
  std::size_t offset = 0;
};

using Pointer = std::variant<TensorArgument, ScratchArgument>;

/// The tensor map (TMA descriptor, compute capability 9.0) of a row-major matrix: the 128 bytes
/// that cuTensorMapEncodeTiled fills in, passed by value and encoded for the address at hand in
/// each run. Elements outside of the matrix read as zeros and are not written.
struct TensorMapArgument {
  Pointer matrix;  // 16-byte aligned
  DType dtype = DType::bf16;
  std::int64_t rows = 0;
  std::int64_t columns = 0;    // columns * dtype_bytes is a multiple of 16
  std::uint32_t box_rows = 0;  // at most 256
  /// At most 256. box_columns * dtype_bytes is 32, 64 or 128, which is also the swizzle's width;
  /// without a swizzle any multiple of 16.
  std::uint32_t box_columns = 0;
  /// Matrices of rows x columns that lie one after the other; 0: one matrix, and a map of two
  /// dimensions. Else the tensor map has three.
  std::int64_t matrices = 0;
  bool swizzled = true;
  std::uint32_t box_matrices = 1;  // of a box of three dimensions, at most 256
  std::int64_t offset = 0;         // bytes from the pointer to the matrix, a multiple of 16
};

/// Numbers that a kernel takes by value, as a struct of one array of float: at most 512.
struct ArrayArgument {
  std::vector<float> values;
};

using Argument = std::variant<TensorArgument, ScratchArgument, std::int32_t, std::int64_t, float,
                              TensorMapArgument, ArrayArgument>;

/// Bytes of the kernel's parameter: 128 of a tensor map.
inline std::size_t argument_bytes(const Argument& argument) {
  if (std::holds_alternative<TensorMapArgument>(argument)) return 128;
  if (const auto* array = std::get_if<ArrayArgument>(&argument))
    return array->values.size() * sizeof(float);
  const bool four_bytes =
      std::holds_alternative<std::int32_t>(argument) || std::holds_alternative<float>(argument);
  return four_bytes ? 4 : 8;
}

/// A kernel's only parameter, a struct passed by value: fields at their offsets, zeros elsewhere. A
/// field is as large as its argument; that of a tensor map begins at a multiple of 64.
struct ParameterStruct {
  struct Field {
    std::size_t offset = 0;
    Argument value;
  };
  std::size_t bytes = 0;  // at most 16,384
  std::vector<Field> fields;
};

/// The pointer as an argument.
inline Argument argument_of(const Pointer& pointer) {
  return std::visit([](const auto& place) { return Argument{place}; }, pointer);
}

/// Device memory that lives for one run, 256-byte aligned.
struct Scratch {
  std::size_t bytes = 0;
  bool zeroed = false;  // cleared at the start of every run, at the cost of one more launch
  /// Of one that is zeroed: the kernels leave it zero, so that the program may run again in the
  /// same workspace without that.
  bool left_zero = false;
};

struct KernelLaunch {
  std::size_t kernel = 0;  // index into Program::kernels
  Dim3 grid;
  Dim3 block;
  Dim3 cluster;
  std::uint32_t shared_bytes = 0;  // dynamic shared memory
  /// Programmatic dependent launch (compute capability 9.0): its blocks may start before the launch
  /// before it is complete; the kernel itself waits where it needs that.
  bool programmatic = false;
  /// Tensors that it reads before it waits: it is not launched programmatically behind a launch
  /// that writes one of these.
  std::vector<TensorArgument> read_early = {};
  /// Blocks wait for each other: the launch fails unless all of them are resident at once.
  bool cooperative = false;
  std::vector<Argument> arguments;  // in the order of the kernel's parameters
  /// Instead of arguments: the kernel takes one struct.
  std::optional<ParameterStruct> parameters = std::nullopt;
};

/// c [m,n] = a [m,k] · b [n,k]ᵀ (+ c), row-major, fp32 accumulation, by the vendor's BLAS with all
/// the device's resources. An operand that is transposed lies as [k,m] or [k,n]. It is the call
/// that a user would make; used by baselines and to measure the ceiling. In fp8 c is bf16, and a
/// and b have an f32 scale each if they are given.
struct LibraryGemm {
  DType dtype = DType::f32;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  Pointer a;
  Pointer b;
  Pointer c;
  bool a_transposed = false;
  bool b_transposed = false;
  bool accumulates = false;
  std::optional<Pointer> a_scale = std::nullopt;
  std::optional<Pointer> b_scale = std::nullopt;
  /// Products of the same sizes, one after the other in memory (a strided batch).
  struct Batch {
    std::int64_t count = 1;
    std::int64_t a = 0;  // elements from one matrix to the next; 0: all products have the same one
    std::int64_t b = 0;
    std::int64_t c = 0;
  };
  Batch batch = {};

  /// From the first element of all products' operands to the last.
  std::int64_t a_elements() const { return (batch.count - 1) * batch.a + m * k; }
  std::int64_t b_elements() const { return (batch.count - 1) * batch.b + n * k; }
  std::int64_t c_elements() const { return (batch.count - 1) * batch.c + m * n; }

  DType c_dtype() const { return dtype == DType::fp8 ? DType::bf16 : dtype; }
};

/// y = the sum of x over the ranks of a group, by the vendor's library of collectives. x and y have
/// `elements` each, and may be the same.
struct LibrarySum {
  DType dtype = DType::f32;
  std::int64_t elements = 0;
  Pointer x;
  Pointer y;
  Pointer group;  // the rank's memory, which names its communicator
};

/// c [m,n] = a [m,k] · b [n,k]ᵀ in float64, row-major, of matrices on the host. An operand that is
/// transposed lies as [k,m] or [k,n].
struct DoubleProduct {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  const double* a = nullptr;
  const double* b = nullptr;
  bool a_transposed = false;
  bool b_transposed = false;
  double* c = nullptr;
};

/// Runs a task on several threads of the CPU.
class Parallel {
 public:
  virtual ~Parallel() = default;
  virtual int max_threads() const = 0;
  /// Calls body(i) once for each i in [0, tasks) on at most `threads` threads, and returns when
  /// all are done. Tasks are taken in order, so equal ones balance.
  virtual void run(int tasks, int threads, const std::function<void(int)>& body) = 0;
  /// Computes the product by something faster than the threads, if there is such a thing here and
  /// its result can be relied on; else returns false, and c holds anything.
  virtual bool multiply(const DoubleProduct&) { return false; }
};

struct HostCall {
  void* const* tensors;             // the op's tensors, in the order of Op::tensors()
  std::vector<std::byte*> scratch;  // in the order of Program::scratch
  Parallel& parallel;
};
using HostFunction = std::function<void(const HostCall&)>;

inline std::byte* address_of(const HostCall& call, const Pointer& pointer) {
  if (const auto* place = std::get_if<TensorArgument>(&pointer))
    return static_cast<std::byte*>(call.tensors[place->tensor]) + place->offset;
  const auto& place = std::get<ScratchArgument>(pointer);
  return call.scratch[place.scratch] + place.offset;
}

using Step = std::variant<KernelLaunch, LibraryGemm, LibrarySum, HostFunction>;

struct Program {
  std::vector<KernelSource> kernels;
  std::vector<Scratch> scratch;
  std::vector<Step> steps;  // in order, each after the one before is complete
  /// How many of the op's tensors its host functions may look at: a capture keeps that many
  /// addresses. Required where there is a host function.
  std::size_t host_tensors = 0;
};

}  // namespace fftune
