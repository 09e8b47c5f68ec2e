// The backward pass on the CPU: the sums D, then blocks of queries for dq and blocks of keys for dk
// and dv. Each block computes its scores again, so that no two threads add to one gradient. All
// products are OpenBLAS's.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/attention/cpu/host_attention.hpp"
#include "kernels/attention/engine.hpp"
#include "kernels/common/cpu_task.hpp"

namespace fftune::attention {
namespace {

constexpr float lowest = -std::numeric_limits<float>::infinity();

/// D of all queries, [heads, tokens], and from it d_sinks.
class OutputSums {
 public:
  OutputSums(const HostAttention& host, const HostCall& call, float* sums)
      : host_(host), call_(call), sums_(sums) {}

  float at(const Block& block, std::int64_t query) const {
    return sums_[block.head * host_.layer.q_tokens() + block.sequence.first_query + query];
  }

  void compute(int threads, float* rooms) {
    constexpr std::int64_t rows = 64;
    const std::int64_t dim = host_.layer.v_dim;
    gemm_cpu::deal(
        call_.parallel, threads, host_.query_blocks(call_, rows),
        [&](std::size_t worker, std::int64_t task) {
          Block block = host_.query_block(call_, rows, task);
          const Range all = block.range;
          float* const room = rooms + static_cast<std::int64_t>(worker) * 2 * dim;
          for (std::int64_t i = all.first; i < all.last; ++i) {
            block.range = {i, i + 1};
            const MatrixView d_out = host_.query_rows(call_, host_.at.d_out, block, room);
            const MatrixView out = host_.query_rows(call_, host_.at.out, block, room + dim);
            host_.vector->dot(
                d_out.data, 0, out.data, 0, static_cast<std::size_t>(dim), 1, 1,
                sums_ + block.head * host_.layer.q_tokens() + block.sequence.first_query + i);
          }
        });
    if (host_.layer.sinks) compute_sinks(threads);
  }

 private:
  void compute_sinks(int threads) const {
    auto* const d_sinks = static_cast<float*>(call_.tensors[host_.at.d_sinks]);
    const auto* const lse = static_cast<const float*>(call_.tensors[host_.at.lse]);
    call_.parallel.run(static_cast<int>(host_.layer.heads), threads, [&](int task) {
      double total = 0;
      for (std::int64_t index = 0; index < host_.layer.b; ++index) {
        const Block block{host_.sequence(call_, index), task, {}};
        for (std::int64_t i = 0; i < block.sequence.queries; ++i) {
          const float own = lse[host_.lse_at(block.sequence, task, i)];
          if (own != lowest)
            total -= double{std::exp(host_.sink(call_, task) - own)} * double{at(block, i)};
        }
      }
      d_sinks[task] = static_cast<float>(total);
    });
  }

  const HostAttention& host_;
  const HostCall& call_;
  float* sums_;
};

/// The operands of a block of queries.
struct QueryRows {
  MatrixView q, d_out;
};

/// Turns scores into weights p, and products d_out vᵀ into the gradients ds of scale · q kᵀ.
void differentiate(const HostAttention& host, const HostCall& call, const Block& block,
                   std::int64_t width, const OutputSums& sums, const float* slope, float* weights,
                   float* gradients) {
  const auto* const lse = static_cast<const float*>(call.tensors[host.at.lse]);
  for (std::int64_t i = 0; i < block.range.size(); ++i) {
    const std::int64_t query = block.range.first + i;
    const float own = lse[host.lse_at(block.sequence, block.head, query)];
    float *const p = weights + i * width, *const ds = gradients + i * width;
    if (own == lowest) {
      std::fill_n(p, width, 0.0f);
      std::fill_n(ds, width, 0.0f);
      continue;
    }
    if (std::isnan(own))  // keys that are masked stay so
      std::replace_if(
          p, p + width, [](float score) { return score != lowest; }, own);
    const float sum = sums.at(block, query);
    const float* const of_row = slope == nullptr ? nullptr : slope + i * width;
    for (std::int64_t j = 0; j < width; ++j)
      ds[j] = p[j] == lowest ? 0 : (ds[j] - sum) * (of_row == nullptr ? 1 : of_row[j]);
    host.vector->exponentials(p, std::isnan(own) ? 0 : own, static_cast<std::size_t>(width));
    for (std::int64_t j = 0; j < width; ++j) ds[j] *= p[j];
  }
}

void scale_rows(const HostAttention& host, float* rows, std::int64_t count) {
  for (std::int64_t e = 0; e < count * host.layer.dim; ++e) rows[e] *= host.layer.scale;
}

/// The workspace of a thread: a block of queries against one of keys.
struct Workspace {
  Workspace(const Layer& layer, std::int64_t rows, std::int64_t columns)
      : rows_(rows), columns_(columns), dim_(layer.dim), v_dim_(layer.v_dim) {}

  std::int64_t floats() const {
    return 3 * rows_ * columns_ + (rows_ + columns_) * (2 * dim_ + 2 * v_dim_);
  }
  void place(float* room) {
    weights = room;
    gradients = weights + rows_ * columns_;
    slope = gradients + rows_ * columns_;
    q = slope + rows_ * columns_;
    d_out = q + rows_ * dim_;
    dq = d_out + rows_ * v_dim_;
    k = dq + rows_ * dim_;
    v = k + columns_ * dim_;
    dk = v + columns_ * v_dim_;
    dv = dk + columns_ * dim_;
  }

  float *weights = nullptr, *gradients = nullptr, *slope = nullptr;
  float *q = nullptr, *d_out = nullptr, *dq = nullptr;
  float *k = nullptr, *v = nullptr, *dk = nullptr, *dv = nullptr;

 private:
  std::int64_t rows_, columns_, dim_, v_dim_;
};

/// The weights and gradients of one block of queries and one of keys, in the workspace.
void differentiate_block(const HostAttention& host, const HostCall& call, const Block& block,
                         Range keys, const QueryRows& rows, MatrixView k, MatrixView v,
                         const OutputSums& sums, const Workspace& work) {
  float* const slope = host.layer.softcap > 0 ? work.slope : nullptr;
  host.scores(call, block, keys, rows.q, k, work.weights, slope);
  sgemm(block.range.size(), keys.size(), host.layer.v_dim, rows.d_out, v, 0, work.gradients,
        keys.size());
  differentiate(host, call, block, keys.size(), sums, slope, work.weights, work.gradients);
}

QueryRows query_rows(const HostAttention& host, const HostCall& call, const Block& block,
                     const Workspace& work) {
  return {host.query_rows(call, host.at.q, block, work.q),
          host.query_rows(call, host.at.d_out, block, work.d_out)};
}

MatrixView transposed(MatrixView matrix) {
  matrix.transposed = true;
  return matrix;
}

void compute_dq(const HostAttention& host, const HostCall& call, const Block& block,
                std::int64_t columns, const OutputSums& sums, const Workspace& work) {
  const std::int64_t rows = block.range.size(), dim = host.layer.dim;
  const std::int64_t kv_head = block.head / host.layer.group();
  std::fill_n(work.dq, rows * dim, 0.0f);
  const QueryRows of_queries = query_rows(host, call, block, work);
  const Range all = host.keys_of(block.sequence, block.range);
  for (std::int64_t first = all.first; first < all.last; first += columns) {
    const Range keys{first, std::min(first + columns, all.last)};
    if (!host.sees_any(call, block.sequence, block.head, block.range, keys)) continue;
    const MatrixView k = host.key_rows(call, host.at.k, block.sequence, kv_head, keys, work.k);
    const MatrixView v = host.key_rows(call, host.at.v, block.sequence, kv_head, keys, work.v);
    differentiate_block(host, call, block, keys, of_queries, k, v, sums, work);
    sgemm(rows, dim, keys.size(), {work.gradients, keys.size()}, transposed(k), 1, work.dq, dim);
  }
  scale_rows(host, work.dq, rows);
  host.store_rows(call, host.at.dq, host.layer.heads,
                  block.sequence.first_query + block.range.first, block.head, rows, work.dq);
}

void compute_dk_dv(const HostAttention& host, const HostCall& call, const Block& of_keys,
                   std::int64_t rows, const OutputSums& sums, const Workspace& work) {
  const Layer& layer = host.layer;
  const Sequence& sequence = of_keys.sequence;
  const std::int64_t dim = layer.dim, v_dim = layer.v_dim;
  std::fill_n(work.dk, of_keys.range.size() * dim, 0.0f);
  std::fill_n(work.dv, of_keys.range.size() * v_dim, 0.0f);
  const Range keys{of_keys.range.first, std::min(of_keys.range.last, sequence.keys)};
  const std::int64_t columns = keys.size();
  const std::int64_t parts = columns > 0 ? ceil_div(sequence.queries, rows) : 0;
  MatrixView k{}, v{};
  if (parts > 0) {
    k = host.key_rows(call, host.at.k, sequence, of_keys.head, keys, work.k);
    v = host.key_rows(call, host.at.v, sequence, of_keys.head, keys, work.v);
  }
  for (std::int64_t member = 0; member < layer.group(); ++member)
    for (std::int64_t part = 0; part < parts; ++part) {
      const Block block{sequence, of_keys.head * layer.group() + member,
                        gemm_cpu::part_of(sequence.queries, parts, part)};
      const Range seen = host.keys_of(sequence, block.range);
      if (seen.first >= keys.last || seen.last <= keys.first) continue;
      if (!host.sees_any(call, sequence, block.head, block.range, keys)) continue;
      const QueryRows of_queries = query_rows(host, call, block, work);
      differentiate_block(host, call, block, keys, of_queries, k, v, sums, work);
      const std::int64_t depth = block.range.size();
      sgemm(columns, dim, depth, {work.gradients, columns, true}, transposed(of_queries.q), 1,
            work.dk, dim);
      sgemm(columns, v_dim, depth, {work.weights, columns, true}, transposed(of_queries.d_out), 1,
            work.dv, v_dim);
    }
  scale_rows(host, work.dk, of_keys.range.size());
  const std::int64_t first = sequence.first_key + of_keys.range.first;
  host.store_rows(call, host.at.dk, layer.kv_heads, first, of_keys.head, of_keys.range.size(),
                  work.dk);
  host.store_rows(call, host.at.dv, layer.kv_heads, first, of_keys.head, of_keys.range.size(),
                  work.dv);
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const std::int64_t rows = config.at("block_q"), columns = config.at("block_k");
  const int threads = config.get("threads");
  const HostAttention host(problem, facts);
  const Workspace workspace(host.layer, rows, columns);
  Program program;
  program.host_tensors = host.at.count;
  program.scratch = {{gemm_cpu::bytes_of_floats(host.layer.q_tokens() * host.layer.heads), false},
                     {gemm_cpu::bytes_of_floats(threads * workspace.floats()), false}};
  program.steps.emplace_back(HostFunction([=](const HostCall& call) {
    const BlasThreads one(1);
    float* const rooms = reinterpret_cast<float*>(call.scratch[1]);
    OutputSums sums(host, call, reinterpret_cast<float*>(call.scratch[0]));
    sums.compute(threads, rooms);
    const std::int64_t of_keys = host.key_blocks(call, columns);
    gemm_cpu::deal(call.parallel, threads, of_keys + host.query_blocks(call, rows),
                   [&](std::size_t worker, std::int64_t task) {
                     Workspace work = workspace;
                     work.place(rooms + static_cast<std::int64_t>(worker) * workspace.floats());
                     // The blocks of keys first: each has the heads of a group to add up.
                     if (task < of_keys)
                       compute_dk_dv(host, call, host.key_block(call, columns, task), rows, sums,
                                     work);
                     else
                       compute_dq(host, call, host.query_block(call, rows, task - of_keys), columns,
                                  sums, work);
                   });
  }));
  return program;
}

}  // namespace

// It refuses nothing: the fallback too.
constinit const Engine cpu_backward_engine{
    .name = "cpu_blas_backward",
    .summary = "blocks of queries and keys, products by OpenBLAS",
    .device_kind = DeviceKind::cpu,
    .backward = true,
    .is_fallback = true,
    .search = {block_space, default_blocks},
    .program = program,
    .sources = {"attention/cpu/backward.cpp"}};

}  // namespace fftune::attention
