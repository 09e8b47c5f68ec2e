// A backend: one opened device that compiles programs, holds memory, runs and times.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"

namespace fftune {

struct KernelReport {
  std::string name;  // the name expression
  int registers = 0;
  int spill_bytes = 0;  // spill stores and loads, bytes a thread
  int static_shared_bytes = 0;
  std::vector<std::string> warnings;  // of the assembler, such as C7510: wgmma serialised
  std::string ptx_hash{};  // of the instructions, whatever the sources' text; by a Compiler alone
};

struct CompileReport {
  std::vector<KernelReport> kernels;
  double seconds = 0;   // spent compiling; 0 when every kernel came from the cache
  bool cached = false;  // every kernel came from the cache
  std::string failure;  // why there is no kernel, one line; empty on success

  int spill_bytes() const;
};

/// A program that is compiled and loaded. Immutable: any thread may enqueue it.
class Executable {
 public:
  virtual ~Executable() = default;
  virtual const CompileReport& report() const = 0;
  /// Bytes of workspace that enqueue needs, 256-byte aligned.
  virtual std::size_t workspace_bytes() const = 0;
  /// Starts the program on `stream` (a CUstream; ignored by the CPU, which runs it here and now).
  /// `tensors` are device addresses in the order of Op::tensors(). Allocates nothing and never
  /// synchronises. Throws Error(device_fault) if a launch is refused.
  virtual void enqueue(void* const* tensors, void* workspace, void* stream) const = 0;
  /// The same, where the workspace is as an earlier run of this program has left it: nothing is
  /// cleared that its kernels leave zero.
  virtual void enqueue_again(void* const* tensors, void* workspace, void* stream) const {
    enqueue(tensors, workspace, stream);
  }
};

struct CompileResult {
  std::shared_ptr<const Executable> executable;  // null if report.failure says why
  CompileReport report;
};

/// Device memory, freed on destruction.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual void* data() const = 0;
  virtual std::size_t bytes() const = 0;
};

/// How a peer finds memory that this process shares: another process, or a thread of this one.
struct SharedHandle {
  std::uint64_t process = 0;             // that has CUDA's memory: no other has this number
  std::uint64_t key = 0;                 // of CUDA's memory: random, and known in this process
  std::array<std::byte, 64> bytes = {};  // CUDA's handle
  std::array<char, 32> device = {};      // where it is, for messages: a PCI bus, or nothing
  int descriptor = -1;                   // of SharedPages; the owner's
};

/// Memory of the device that peers in other processes of this host read and write.
class SharedBuffer : public Buffer {
 public:
  virtual const SharedHandle& handle() const = 0;
  /// Two words through which the host and the device tell each other of errors without waiting:
  /// their address on the host, and on the device.
  virtual std::uint32_t* notices() const = 0;
  virtual std::uint64_t device_notices() const = 0;
  /// On a CPU: returns when no collective of this process has it any more. One that waits for peers
  /// ends by the notice. Streams of a GPU are the caller's to wait for.
  virtual void wait_until_unused() const {}
};

/// A group's ranks as the vendor's library of collectives knows them: NCCL on GPUs.
class Communicator {
 public:
  virtual ~Communicator() = default;
  /// Ends the sums that run. Later ones are errors. Any thread may call it, at any time.
  virtual void end() = 0;
  /// Throws Error(device_fault) with the library's words if it found a fault. Waits for nothing.
  virtual void check() const = 0;
};

/// One rank's way into a communicator.
struct CommunicatorOptions {
  using Id = std::array<std::byte, 128>;
  Id id = {};  // rank 0's, the same on all ranks
  int rank = 0, ranks = 1;
  const void* group = nullptr;  // the memory by which LibrarySum names it
  std::chrono::steady_clock::time_point deadline;
  std::function<bool()> gives_up;  // a rank is gone: there is nothing to wait for
};

/// A captured sequence of passes that can be run again and again.
class Replay {
 public:
  virtual ~Replay() = default;
  /// Runs the sequence once and returns the seconds that one pass took on average, between device
  /// events. Throws Error(device_fault).
  virtual double sample() = 0;
};

/// The limits that the device reached in a measurement just now: the roofline's two ceilings.
struct Limits {
  double bytes_per_second = 0;  // of memory: by a large copy, on a CPU also by reading alone
  double flops_per_second = 0;  // of the vendor's GEMM in this dtype; 0 if unknown
  std::string method{};         // how both came about, for people: "copy of 1 GiB; cuBLASLt 8192^3"
};

/// Where the kernels of a backend came from, since it was opened.
struct CompileCounters {
  std::uint64_t compiled = 0;     // by the run-time compiler
  double compile_seconds = 0;     // in it
  std::uint64_t from_cache = 0;   // from the disk
  std::uint64_t from_bundle = 0;  // from a bundle
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const DeviceFacts& facts() const = 0;

  /// Warnings of this session for the user, one line each: "kernels are not cached: ...".
  virtual std::vector<std::string> warnings() const { return {}; }

  /// Compiles, or takes from the cache, and loads. A failure is a result. Any thread may call it.
  virtual CompileResult compile(const Program& program) = 0;

  /// The same for one of many programs that differ in numbers alone: measures nothing, so that it
  /// takes microseconds once the kernels are compiled. A product of the vendor's library is run by
  /// the algorithm that the library names first.
  virtual CompileResult bind(const Program& program) { return compile(program); }

  /// Executable::workspace_bytes() of the program, without compiling it.
  virtual std::size_t workspace_bytes(const Program& program) const;

  /// Counts of compile() and bind() so far.
  virtual CompileCounters counters() const { return {}; }

  virtual std::size_t free_bytes() const = 0;
  /// Uninitialised, 256-byte aligned. Throws Error(unavailable) with the bytes needed and there.
  virtual std::unique_ptr<Buffer> allocate(std::size_t bytes) = 0;
  /// Zeros, for peers. Throws Error(unavailable).
  virtual std::unique_ptr<SharedBuffer> allocate_shared(std::size_t bytes);
  /// The first `bytes` of a peer's memory; takes the handle's descriptor over. Throws
  /// Error(unavailable) that says why this device cannot reach it.
  virtual std::unique_ptr<Buffer> open_shared(const SharedHandle& handle, std::size_t bytes);
  /// A name for one communicator, and a rank's way into it, which waits for all ranks. Both throw
  /// Error(unavailable) that says why there is none.
  virtual CommunicatorOptions::Id communicator_id();
  virtual std::unique_ptr<Communicator> communicate(const CommunicatorOptions& options);
  virtual void write(void* device, const void* host, std::size_t bytes) = 0;
  virtual void read(void* host, const void* device, std::size_t bytes) = 0;
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;  // both on the device
  virtual void fill(void* device, std::uint8_t byte, std::size_t bytes) = 0;

  /// The stream for enqueue outside of captures; write, read, copy and fill are ordered with it.
  virtual void* stream() = 0;
  /// Waits; throws Error(device_fault) with the device's own words if anything before it failed.
  virtual void synchronize() = 0;

  /// Computes the product on the device; false, and c holds anything, where it does not do that.
  /// Throws Error(device_fault).
  virtual bool multiply(const DoubleProduct&) { return false; }

  /// Records `passes` calls of enqueue(pass, stream) into one replayable sequence: a CUDA graph.
  virtual std::unique_ptr<Replay> capture(
      int passes, const std::function<void(int pass, void* stream)>& enqueue) = 0;

  /// Disturbances of measurements on the device at this moment, just after it worked: other
  /// processes, clocks that are held back; one line each. Empty if the device does not report any.
  virtual std::vector<std::string> disturbances() { return {}; }

  /// Measures the ceilings (about a second), or returns what it measured before.
  virtual Limits limits(DType dtype) = 0;
};

// A compiler: builds a program's kernels for an architecture where no such device need be.

class Compiler {
 public:
  virtual ~Compiler() = default;
  /// Compiles every kernel of `program`, or takes it from the cache, and checks its launches
  /// against the architecture's limits. A failure is a result. Any thread may call it.
  virtual CompileReport compile(const Program& program) = 0;
  /// Warnings for the user, one line each: "kernels are not cached: ...".
  virtual std::vector<std::string> warnings() const = 0;
};

/// The place of a tensor that is not there.
constexpr std::size_t nowhere = static_cast<std::size_t>(-1);

/// An executable on other tensors, number i of its own being number places[i] of those it is given,
/// or null where that is `nowhere`, and on a part of the workspace.
class PlacedExecutable final : public Executable {
 public:
  /// `offset`: of its part, 256-byte aligned. `again`: it has run there before.
  PlacedExecutable(std::shared_ptr<const Executable> executable, std::vector<std::size_t> places,
                   std::size_t offset, bool again)
      : executable_(std::move(executable)),
        places_(std::move(places)),
        offset_(offset),
        again_(again) {}

  const CompileReport& report() const override { return executable_->report(); }
  std::size_t workspace_bytes() const override { return offset_ + executable_->workspace_bytes(); }
  void enqueue(void* const* tensors, void* workspace, void* stream) const override;

 private:
  std::shared_ptr<const Executable> executable_;
  std::vector<std::size_t> places_;
  std::size_t offset_;
  bool again_;
};

/// Each of `executables` once for each of `places`, all of them before they come again. Each has a
/// part of the workspace to itself, so that it is there as the time before has left it. `first`
/// takes the place of the first one in the first time.
std::vector<std::shared_ptr<const Executable>> repeated(
    const std::vector<std::shared_ptr<const Executable>>& executables,
    const std::vector<std::vector<std::size_t>>& places,
    const std::shared_ptr<const Executable>& first);

}  // namespace fftune
