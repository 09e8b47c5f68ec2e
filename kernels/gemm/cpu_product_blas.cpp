// Products on the CPU by blocks over OpenBLAS: every thread multiplies blocks of its own with a
// product of one thread, and finishes each while it is in the cache. Operands of bf16 are widened
// by slices of k.
#include <algorithm>
#include <atomic>

#include "cpu/blas.hpp"
#include "kernels/common/cpu_vector.hpp"
#include "kernels/gemm/cpu_product_block.hpp"
#include "kernels/gemm/product_families.hpp"

namespace fftune {
namespace {

constexpr std::int64_t slice = 512;  // of k, where operands are widened

struct Blocks {
  Product product;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  int threads = 1;
  const VectorKernels* vector = nullptr;
  const RowKernels* loops = nullptr;  // of f32

  bool widens() const { return product.dtype != DType::f32; }
  std::int64_t lane_floats() const {
    return rows * columns + (widens() ? (rows + columns) * slice : 0);
  }
};

/// `extent` rows from `first` on of an operand [size, depth], at [k, k + depth of the slice): as it
/// is in f32, else widened into `wide`.
MatrixView view(const Blocks& blocks, const HostCall& call, const Pointer& matrix, bool transposed,
                std::int64_t size, std::int64_t first, std::int64_t extent, std::int64_t k,
                std::int64_t depth, float* wide) {
  const std::int64_t stride = transposed ? size : blocks.product.shape.k;
  const std::int64_t at = transposed ? k * stride + first : first * stride + k;
  const std::byte* from = element_at(call, matrix, blocks.product.dtype, at);
  if (!blocks.widens()) return {reinterpret_cast<const float*>(from), stride, transposed};
  const std::int64_t rows = transposed ? depth : extent, columns = transposed ? extent : depth;
  for (std::int64_t row = 0; row < rows; ++row)
    blocks.vector->widen(reinterpret_cast<const std::uint16_t*>(from) + row * stride,
                         wide + row * columns, static_cast<std::size_t>(columns));
  return {wide, columns, transposed};
}

void run_block(const Blocks& blocks, const HostCall& call, const ProductBlock& block, int result,
               float* lane) {
  const GemmShape& shape = blocks.product.shape;
  float* const wide_a = lane + blocks.rows * blocks.columns;
  float* const wide_b = wide_a + blocks.rows * slice;
  float beta = 0;
  for (int term = 0; term < shape.terms; ++term) {
    const std::int64_t step = blocks.widens() ? slice : shape.k;
    for (std::int64_t k = 0; k < shape.k; k += step, beta = 1) {
      const std::int64_t depth = std::min(step, shape.k - k);
      const auto a = view(blocks, call, blocks.product.a[static_cast<std::size_t>(term + result)],
                          shape.a_transposed, shape.m, block.row, block.rows, k, depth, wide_a);
      const auto b =
          view(blocks, call, blocks.product.b[static_cast<std::size_t>(term)], shape.b_transposed,
               shape.n, block.column, block.columns, k, depth, wide_b);
      sgemm(block.rows, block.columns, depth, a, b, beta, lane, block.columns);
    }
  }
  finish_block(blocks.product, call, block, result, *blocks.loops, lane);
}

void run(const Blocks& blocks, const HostCall& call) {
  const GemmShape& shape = blocks.product.shape;
  const std::int64_t across = ceil_div(shape.n, blocks.columns);
  const std::int64_t tasks = ceil_div(shape.m, blocks.rows) * across * shape.results;
  const BlasThreads alone(1);
  std::atomic<std::int64_t> next{0};
  call.parallel.run(blocks.threads, blocks.threads, [&](int lane) {
    float* const own = reinterpret_cast<float*>(call.scratch[0]) + lane * blocks.lane_floats();
    for (std::int64_t task = next++; task < tasks; task = next++) {
      const std::int64_t place = task / shape.results;
      ProductBlock block{place / across * blocks.rows, blocks.rows, place % across * blocks.columns,
                         blocks.columns};
      block.rows = std::min(block.rows, shape.m - block.row);
      block.columns = std::min(block.columns, shape.n - block.column);
      run_block(blocks, call, block, static_cast<int>(task % shape.results), own);
    }
  });
}

}  // namespace

std::optional<std::string> CpuBlasProduct::refusal(const Problem& problem,
                                                   const DeviceFacts& facts) const {
  return refuse_stage(stage(), problem, facts, DeviceKind::cpu);
}

Space CpuBlasProduct::space(const Problem& problem, const DeviceFacts& facts) const {
  const GemmShape shape = product(problem).shape;
  const auto useful = [](std::int64_t extent, std::vector<std::int64_t> sizes) {
    while (sizes.size() > 1 && sizes[sizes.size() - 2] >= extent) sizes.pop_back();
    return sizes;
  };
  std::vector<std::int64_t> threads{1};
  if (facts.multiprocessors > 1) threads.push_back(facts.multiprocessors);
  return Space()
      .parameter("block_m", "rows of a block", useful(shape.m, {32, 128, 512}))
      .parameter("block_n", "columns of a block", useful(shape.n, {64, 256, 1024}))
      .parameter("threads", "threads, each with products of its own", threads);
}

Config CpuBlasProduct::default_config(const Problem& problem, const DeviceFacts& facts) const {
  // The largest blocks that leave one for each thread: OpenBLAS packs both operands of each.
  const GemmShape shape = product(problem).shape;
  const Space space = this->space(problem, facts);
  Config config{{"block_m", 32}, {"block_n", 64}, {"threads", facts.multiprocessors}};
  for (const auto rows : space.parameters()[0].numbers())
    for (const auto columns : space.parameters()[1].numbers())
      if (ceil_div(shape.m, rows) * ceil_div(shape.n, columns) * shape.results >=
          facts.multiprocessors) {
        config.set("block_m", rows);
        config.set("block_n", columns);
      }
  return config;
}

Program CpuBlasProduct::program(const Problem& problem, const DeviceFacts& facts,
                                const Config& config) const {
  const Blocks blocks{
      product(problem),      config.at("block_m"),        config.at("block_n"),
      config.get("threads"), &vector_kernels(facts.arch), &row_kernels(facts.arch, DType::f32)};
  Program program;
  program.host_tensors = tensors_of(blocks.product);
  program.scratch = {
      {static_cast<std::size_t>(blocks.threads * blocks.lane_floats()) * sizeof(float), false}};
  program.steps.emplace_back(HostFunction([blocks](const HostCall& call) { run(blocks, call); }));
  return program;
}

std::vector<std::string> CpuBlasProduct::sources() const {
  return {"gemm/cpu_product_blas.cpp", "gemm/cpu_product_block.cpp", curve_source,
          row_kernel_sources[0], row_kernel_sources[1]};
}

}  // namespace fftune
