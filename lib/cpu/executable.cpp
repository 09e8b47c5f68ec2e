#include "cpu/executable.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "cpu/blas.hpp"

namespace fftune {
namespace {

constexpr std::size_t alignment = 256;

std::size_t aligned(std::size_t bytes) {
  return (bytes + alignment - 1) / alignment * alignment;
}

/// The operands of a product that OpenBLAS is given in f32: none of its own for f32.
struct Conversion {
  std::size_t a = 0, b = 0, c = 0;  // elements
  std::size_t bytes() const { return (a + b + c) * sizeof(float); }
};

Conversion conversion_of(const LibraryGemm& gemm) {
  if (gemm.dtype == DType::f32) return {};
  return {static_cast<std::size_t>(gemm.a_elements()), static_cast<std::size_t>(gemm.b_elements()),
          static_cast<std::size_t>(gemm.c_elements())};
}

/// Splits [0, count) into chunks over all threads.
template <typename Body>
void for_chunks(Parallel& parallel, std::size_t count, const Body& body) {
  constexpr std::size_t chunk = 1 << 15;
  const auto chunks = static_cast<int>((count + chunk - 1) / chunk);
  parallel.run(chunks, parallel.max_threads(), [&](int i) {
    const auto begin = static_cast<std::size_t>(i) * chunk;
    body(begin, std::min(chunk, count - begin));
  });
}

/// The tensors that the products address, so that a capture keeps these too.
std::size_t tensors_in(const Program& program) {
  std::size_t count = program.host_tensors;
  for (const auto& step : program.steps)
    if (const auto* gemm = std::get_if<LibraryGemm>(&step))
      for (const auto& pointer : {gemm->a, gemm->b, gemm->c})
        if (const auto* argument = std::get_if<TensorArgument>(&pointer))
          count = std::max(count, argument->tensor + 1);
  return count;
}

}  // namespace

std::vector<RecordedCall> CpuEngine::record(const std::function<void()>& enqueue) {
  const auto self = std::this_thread::get_id();
  const auto end = [&] {
    const std::lock_guard lock(mutex_.own());
    return recordings_.extract(self);
  };
  {
    const std::lock_guard lock(mutex_.own());
    recordings_[self].clear();
  }
  try {
    enqueue();
  } catch (...) {
    end();
    throw;
  }
  return std::move(end().mapped());
}

bool CpuEngine::keep(const std::shared_ptr<const CpuProgram>& program, void* const* tensors,
                     void* workspace) {
  const std::lock_guard lock(mutex_.own());
  const auto recording = recordings_.find(std::this_thread::get_id());
  if (recording == recordings_.end()) return false;
  recording->second.push_back({program, {tensors, tensors + program->tensor_count()}, workspace});
  return true;
}

std::string CpuProgram::check(const Program& program) {
  for (std::size_t i = 0; i < program.steps.size(); ++i) {
    const auto& step = program.steps[i];
    if (std::holds_alternative<KernelLaunch>(step))
      return fmt::format("step {} launches a CUDA kernel, which a CPU cannot run", i);
    if (std::holds_alternative<LibrarySum>(step))
      return fmt::format("step {} is a sum by NCCL, which a CPU does not have", i);
    if (std::holds_alternative<HostFunction>(step) && program.host_tensors == 0)
      return fmt::format("step {} is a host function, but Program::host_tensors is not set", i);
    if (const auto* gemm = std::get_if<LibraryGemm>(&step))
      if (gemm->dtype != DType::f32 && gemm->dtype != DType::bf16)
        return fmt::format("step {} is a product in {}: the CPU's are in f32 and bf16", i,
                           dtype_name(gemm->dtype));
  }
  return "";
}

CpuProgram::CpuProgram(std::shared_ptr<CpuEngine> engine, Program program)
    : engine_(std::move(engine)), program_(std::move(program)) {
  tensor_count_ = tensors_in(program_);
  std::size_t offset = 0;
  for (const auto& scratch : program_.scratch) {
    scratch_offsets_.push_back(offset);
    offset += aligned(scratch.bytes);
  }
  conversion_offset_ = offset;
  std::size_t conversion = 0;
  for (const auto& step : program_.steps)
    if (const auto* gemm = std::get_if<LibraryGemm>(&step))
      conversion = std::max(conversion, conversion_of(*gemm).bytes());
  workspace_bytes_ = offset + aligned(conversion);
}

void CpuProgram::run(void* const* tensors, void* workspace) const {
  auto* base = static_cast<std::byte*>(workspace);
  HostCall call{tensors, {}, engine_->pool};
  for (std::size_t i = 0; i < scratch_offsets_.size(); ++i) {
    call.scratch.push_back(base + scratch_offsets_[i]);
    if (program_.scratch[i].zeroed) std::memset(call.scratch[i], 0, program_.scratch[i].bytes);
  }
  const std::lock_guard turn(engine_->turn.own());
  for (const auto& step : program_.steps) {
    if (const auto* product = std::get_if<LibraryGemm>(&step))
      gemm(*product, call, base + conversion_offset_);
    else
      std::get<HostFunction>(step)(call);
  }
}

void CpuProgram::gemm(const LibraryGemm& gemm, const HostCall& call, std::byte* conversion) const {
  const BlasThreads threads(engine_->pool.max_threads());
  const auto* a = reinterpret_cast<const float*>(address_of(call, gemm.a));
  const auto* b = reinterpret_cast<const float*>(address_of(call, gemm.b));
  auto* c = reinterpret_cast<float*>(address_of(call, gemm.c));
  const auto multiply = [&](const float* first, const float* second, float* sums) {
    for (std::int64_t i = 0; i < gemm.batch.count; ++i)
      sgemm(gemm.m, gemm.n, gemm.k,
            {first + i * gemm.batch.a, gemm.a_transposed ? gemm.m : gemm.k, gemm.a_transposed},
            {second + i * gemm.batch.b, gemm.b_transposed ? gemm.n : gemm.k, gemm.b_transposed},
            gemm.accumulates ? 1.0f : 0.0f, sums + i * gemm.batch.c, gemm.n);
  };
  if (gemm.dtype == DType::f32) return multiply(a, b, c);
  const auto elements = conversion_of(gemm);
  auto* wide_a = reinterpret_cast<float*>(conversion);
  auto* wide_b = wide_a + elements.a;
  auto* wide_c = wide_b + elements.b;
  const auto widen = [&](const void* from, float* to, std::size_t count) {
    for_chunks(engine_->pool, count, [&](std::size_t begin, std::size_t length) {
      decode(gemm.dtype, static_cast<const std::uint16_t*>(from) + begin, {to + begin, length});
    });
  };
  widen(a, wide_a, elements.a);
  widen(b, wide_b, elements.b);
  if (gemm.accumulates) widen(c, wide_c, elements.c);
  multiply(wide_a, wide_b, wide_c);
  for_chunks(engine_->pool, elements.c, [&](std::size_t begin, std::size_t length) {
    encode(gemm.dtype, {wide_c + begin, length}, reinterpret_cast<std::uint16_t*>(c) + begin);
  });
}

void CpuExecutable::enqueue(void* const* tensors, void* workspace, void* /*stream*/) const {
  if (!program_->engine().keep(program_, tensors, workspace)) program_->run(tensors, workspace);
}

}  // namespace fftune
