// The forward pass on the CPU: blocks of queries on all threads. The fast engine multiplies blocks
// of keys by OpenBLAS and carries an online softmax from one to the next; the fallback computes row
// by row.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/attention/cpu/host_attention.hpp"
#include "kernels/attention/engine.hpp"
#include "kernels/common/cpu_task.hpp"

namespace fftune::attention {
namespace {

constexpr float lowest = -std::numeric_limits<float>::infinity();

/// The softmax of some rows so far.
struct OnlineSoftmax {
  float* most;    // the largest score of each row
  float* sum;     // of exp(score - most)
  float* values;  // [rows, v_dim]: the sum of exp(score - most) v
};

void divide(const HostAttention& host, const HostCall& call, const Block& block,
            const OnlineSoftmax& softmax) {
  const float sink = host.sink(call, block.head);
  for (std::int64_t i = 0; i < block.range.size(); ++i) {
    const float most = std::max(softmax.most[i], sink);
    // NaN stays in sums and values, whatever they are multiplied by.
    const float factor = softmax.most[i] == lowest ? 0 : std::exp(softmax.most[i] - most);
    float sum = softmax.sum[i] * factor;
    if (sink != lowest) sum += std::exp(sink - most);
    const float by = sum == 0 ? 0 : factor / sum;
    float* const row = softmax.values + i * host.layer.v_dim;
    for (std::int64_t e = 0; e < host.layer.v_dim; ++e) row[e] *= by;
    if (host.layer.lse)
      static_cast<float*>(call.tensors[host.at.lse])[host.lse_at(block.sequence, block.head,
                                                                 block.range.first + i)] =
          sum == 0 ? lowest : most + std::log(sum);
  }
}

void store(const HostAttention& host, const HostCall& call, const Block& block,
           const OnlineSoftmax& softmax) {
  divide(host, call, block, softmax);
  host.store_rows(call, host.at.out, host.layer.heads,
                  block.sequence.first_query + block.range.first, block.head, block.range.size(),
                  softmax.values);
}

/// Turns the scores of a row into weights, and rescales the row's sums to the same reference.
void add_row(const HostAttention& host, const OnlineSoftmax& softmax, std::int64_t i, float* scores,
             std::int64_t count) {
  const auto width = static_cast<std::size_t>(count);
  const float most = std::max(softmax.most[i], host.vector->largest(scores, width));
  if (most != softmax.most[i]) {
    const float factor = std::exp(softmax.most[i] - most);
    softmax.sum[i] *= factor;
    float* const row = softmax.values + i * host.layer.v_dim;
    for (std::int64_t e = 0; e < host.layer.v_dim; ++e) row[e] *= factor;
    softmax.most[i] = most;
  }
  softmax.sum[i] += host.vector->exponentials(scores, most == lowest ? 0 : most, width);
}

void attend_blocks(const HostAttention& host, const HostCall& call, const Block& block,
                   std::int64_t columns, float* room) {
  const std::int64_t rows = block.range.size(), v_dim = host.layer.v_dim;
  const OnlineSoftmax softmax{room, room + rows, room + 2 * rows};
  float* const scores = softmax.values + rows * v_dim;
  float* const q_room = scores + rows * columns;
  float* const kv_room = q_room + rows * host.layer.dim;
  std::fill_n(softmax.most, rows, lowest);
  std::fill_n(softmax.sum, rows, 0.0f);
  std::fill_n(softmax.values, rows * v_dim, 0.0f);
  const MatrixView q = host.query_rows(call, host.at.q, block, q_room);
  const std::int64_t kv_head = block.head / host.layer.group();
  const Range all = host.keys_of(block.sequence, block.range);
  for (std::int64_t first = all.first; first < all.last; first += columns) {
    const Range keys{first, std::min(first + columns, all.last)};
    if (!host.sees_any(call, block.sequence, block.head, block.range, keys)) continue;
    host.scores(call, block, keys, q,
                host.key_rows(call, host.at.k, block.sequence, kv_head, keys, kv_room), scores,
                nullptr);
    for (std::int64_t i = 0; i < rows; ++i)
      add_row(host, softmax, i, scores + i * keys.size(), keys.size());
    MatrixView v = host.key_rows(call, host.at.v, block.sequence, kv_head, keys, kv_room);
    v.transposed = true;
    sgemm(rows, v_dim, keys.size(), {scores, keys.size()}, v, 1, softmax.values, v_dim);
  }
  store(host, call, block, softmax);
}

Program blas_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const HostAttention host(problem, facts);
  const std::int64_t rows = config.at("block_q"), columns = config.at("block_k");
  const int threads = config.get("threads");
  const std::int64_t dim = host.layer.dim, v_dim = host.layer.v_dim;
  const std::int64_t worker_floats =
      rows * (columns + dim + v_dim + 2) + columns * std::max(dim, v_dim);
  return gemm_cpu::worker_program(
      host.at.count, {.count = threads, .floats = worker_floats},
      [=](const HostCall& call) { return host.query_blocks(call, rows); },
      [=](const HostCall& call, float* memory, std::int64_t task) {
        attend_blocks(host, call, host.query_block(call, rows, task), columns, memory);
      });
}

/// One query, with its scores in memory.
void attend_query(const HostAttention& host, const HostCall& call, const Block& block,
                  float* room) {
  const std::int64_t dim = host.layer.dim, v_dim = host.layer.v_dim;
  const std::int64_t kv_head = block.head / host.layer.group();
  const Range keys = host.keys_of(block.sequence, block.range);
  float *const values = room, *const q_room = values + v_dim, *const row_room = q_room + dim;
  float *const scores = row_room + std::max(dim, v_dim), *const weights = scores + host.layer.kv;
  const auto width = static_cast<std::size_t>(dim);
  std::fill_n(values, v_dim, 0.0f);
  float most = lowest, sum = 0;
  if (keys.size() > 0) {
    const MatrixView q = host.query_rows(call, host.at.q, block, q_room);
    for (std::int64_t j = 0; j < keys.size(); ++j) {
      const Range key{keys.first + j, keys.first + j + 1};
      const MatrixView k = host.key_rows(call, host.at.k, block.sequence, kv_head, key, row_room);
      host.vector->dot(k.data, 0, q.data, 0, width, 1, 1, scores + j);
    }
    host.finish_row(call, block.sequence, block.head, block.range.first, keys, scores, nullptr);
    const auto count = static_cast<std::size_t>(keys.size());
    most = host.vector->largest(scores, count);
    std::copy_n(scores, count, weights);
    sum = host.vector->exponentials(weights, most == lowest ? 0 : most, count);
    for (std::int64_t j = 0; j < keys.size(); ++j) {
      // A masked key may hold anything; the weight of another may underflow.
      if (scores[j] == lowest) continue;
      const Range key{keys.first + j, keys.first + j + 1};
      const MatrixView v = host.key_rows(call, host.at.v, block.sequence, kv_head, key, row_room);
      for (std::int64_t e = 0; e < v_dim; ++e) values[e] += weights[j] * v.data[e];
    }
  }
  store(host, call, block, {&most, &sum, values});
}

Program plain_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const HostAttention host(problem, facts);
  const int threads = config.get("threads");
  const std::int64_t dim = host.layer.dim, v_dim = host.layer.v_dim;
  const std::int64_t worker_floats = 2 * host.layer.kv + dim + v_dim + std::max(dim, v_dim);
  constexpr std::int64_t rows = 16;
  return gemm_cpu::worker_program(
      host.at.count, {.count = threads, .floats = worker_floats, .call_blas = false},
      [=](const HostCall& call) { return host.query_blocks(call, rows); },
      [=](const HostCall& call, float* memory, std::int64_t task) {
        Block block = host.query_block(call, rows, task);
        const Range queries = block.range;
        for (std::int64_t i = queries.first; i < queries.last; ++i) {
          block.range = {i, i + 1};
          attend_query(host, call, block, memory);
        }
      });
}

Space plain_space(const Layer&, const DeviceFacts& facts) {
  return Space().parameter("threads", "threads at most", thread_counts(facts));
}

Config plain_default(const Layer& layer, const DeviceFacts& facts) {
  return {{"threads", default_threads(layer, facts)}};
}

}  // namespace

constinit const Engine cpu_blas_engine{
    .name = "cpu_blas",
    .summary = "blocks of queries and keys, products by OpenBLAS",
    .device_kind = DeviceKind::cpu,
    .search = {block_space, default_blocks},
    .program = blas_program,
    .sources = {"attention/cpu/forward.cpp"}};

constinit const Engine cpu_plain_engine{.name = "cpu_plain",
                                        .summary = "one query after the other: the fallback",
                                        .device_kind = DeviceKind::cpu,
                                        .is_fallback = true,
                                        .search = {plain_space, plain_default},
                                        .program = plain_program,
                                        .batch_invariant = true,
                                        .sources = {"attention/cpu/forward.cpp"}};

}  // namespace fftune::attention
