// A program that is ready to run on the CPU, and the engine that runs it.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/fork.hpp"
#include "device/backend.hpp"
#include "device/program.hpp"

namespace fftune {

class CpuProgram;

/// One recorded enqueue.
struct RecordedCall {
  std::shared_ptr<const CpuProgram> program;
  std::vector<void*> tensors;
  void* workspace = nullptr;
};

/// State that the executables of one backend share.
class CpuEngine {
 public:
  explicit CpuEngine(std::unique_ptr<Parallel> threads)
      : owned_(std::move(threads)), pool(*owned_) {}

 private:
  std::unique_ptr<Parallel> owned_;

 public:
  Parallel& pool;
  ForkMutex turn;  // held by the program that runs

  /// The calls that the calling thread enqueues while `enqueue` runs, kept instead of run.
  std::vector<RecordedCall> record(const std::function<void()>& enqueue);
  /// Keeps the call if the calling thread records.
  bool keep(const std::shared_ptr<const CpuProgram>& program, void* const* tensors,
            void* workspace);

 private:
  ForkMutex mutex_;
  std::map<std::thread::id, std::vector<RecordedCall>> recordings_;  // in progress
};

/// The steps of a program over the engine.
class CpuProgram {
 public:
  /// `program` has passed check().
  CpuProgram(std::shared_ptr<CpuEngine> engine, Program program);

  /// Why the CPU cannot run it, one line; empty if it can.
  static std::string check(const Program& program);

  std::size_t workspace_bytes() const { return workspace_bytes_; }
  std::size_t tensor_count() const { return tensor_count_; }
  void run(void* const* tensors, void* workspace) const;
  CpuEngine& engine() const { return *engine_; }

 private:
  void gemm(const LibraryGemm& gemm, const HostCall& call, std::byte* conversion) const;

  std::shared_ptr<CpuEngine> engine_;
  Program program_;
  std::size_t tensor_count_ = 0;  // whose addresses a capture keeps
  std::vector<std::size_t> scratch_offsets_;
  std::size_t conversion_offset_ = 0;  // of the products' operands in f32
  std::size_t workspace_bytes_ = 0;
};

class CpuExecutable final : public Executable {
 public:
  CpuExecutable(std::shared_ptr<const CpuProgram> program, CompileReport report)
      : program_(std::move(program)), report_(std::move(report)) {}
  const CompileReport& report() const override { return report_; }
  std::size_t workspace_bytes() const override { return program_->workspace_bytes(); }
  void enqueue(void* const* tensors, void* workspace, void* stream) const override;

 private:
  std::shared_ptr<const CpuProgram> program_;
  CompileReport report_;
};

}  // namespace fftune
