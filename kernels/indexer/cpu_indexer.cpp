// indexer on the CPU: a task has some queries of a sequence. Products with blocks of keys are
// OpenBLAS's; the best of a query's scores are found by selection.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "cpu/blas.hpp"
#include "kernels/common/cpu_task.hpp"
#include "kernels/common/sampling.cuh"
#include "kernels/gemm/cpu/host_gemm.hpp"
#include "kernels/indexer/families.hpp"
#include "kernels/indexer/indexer.hpp"

namespace fftune::indexer {
namespace {

/// The tensors of a call. Memory of a worker, in floats: q [queries * heads, dim], keys [columns,
/// dim] and their scales, products [queries * heads, columns].
struct Host {
  Layer layer;
  std::size_t q, weights, k, k_scale, pages, lengths, ids, scores, count;
  gemm_cpu::Converter converter;

  Host(const Problem& problem, const DeviceFacts& facts)
      : layer(layer_of(problem)), converter{&vector_kernels(facts.arch)} {
    const TensorPlaces places(indexer_op().tensors(problem));
    q = places.at("q"), weights = places.at("weights"), k = places.at("k");
    k_scale = places.at("k_scale"), lengths = places.at("lengths");
    pages = places.at("pages"), ids = places.at("ids"), scores = places.at("scores");
    count = places.count();
  }

  std::int64_t worker_floats(std::int64_t queries, std::int64_t columns) const {
    const std::int64_t rows = queries * layer.heads;
    return rows * (layer.dim + columns) + columns * (layer.dim + 1);
  }
  void load(const HostCall& call, std::size_t tensor, DType dtype, std::int64_t first,
            std::int64_t elements, float* to) const {
    const auto* const data = static_cast<const std::byte*>(call.tensors[tensor]);
    converter.load(dtype, data + first * static_cast<std::int64_t>(dtype_bytes(dtype)), to,
                   elements);
  }

  /// Keys [first, first + keys) of a sequence, as many of them at once as lie together.
  void load_keys(const HostCall& call, std::int64_t sequence, std::int64_t first, std::int64_t keys,
                 float* rows, float* scales) const {
    const auto* const table = static_cast<const std::int32_t*>(address_of(call, pages));
    for (std::int64_t j = 0, part = 0; j < keys; j += part) {
      const std::int64_t key = first + j, block = block_of(layer, table, sequence, key),
                         row = layer.page > 0 ? key % layer.page : key;
      part = std::min(keys - j, layer.keys_of_block() - row);
      if (block < 0) {
        std::fill_n(rows + j * layer.dim, part * layer.dim, 0.0f);
        std::fill_n(scales + j, part, 0.0f);
        continue;
      }
      load(call, k, layer.dtype_of_keys(), block * layer.k_block + row * layer.dim,
           part * layer.dim, rows + j * layer.dim);
      if (layer.e4m3)
        load(call, k_scale, DType::f32, block * layer.scale_block + row, part, scales + j);
    }
  }

  /// Queries [first, first + queries) of a sequence.
  void choose(const HostCall& call, std::int64_t sequence, std::int64_t first, std::int64_t queries,
              std::int64_t columns, float* room) const {
    const std::int64_t rows = queries * layer.heads, row = sequence * layer.s + first;
    float* const own_q = room;
    float* const keys = own_q + rows * layer.dim;
    float* const scales = keys + columns * layer.dim;
    float* const products = scales + columns;
    load(call, q, layer.dtype, row * layer.heads * layer.dim, rows * layer.dim, own_q);
    const float* const weight =
        static_cast<const float*>(call.tensors[weights]) + row * layer.heads;
    float* const score = static_cast<float*>(call.tensors[scores]) + row * layer.kv;
    const std::int64_t length =
        length_of(layer, static_cast<const std::int32_t*>(address_of(call, lengths)), sequence);
    const std::int64_t visible = layer.visible(first + queries - 1, length);
    for (std::int64_t at = 0; at < visible; at += columns) {
      const std::int64_t part = std::min(columns, visible - at);
      load_keys(call, sequence, at, part, keys, scales);
      sgemm(rows, part, layer.dim, {own_q, layer.dim}, {keys, layer.dim}, 0, products, part);
      for (std::int64_t i = 0; i < queries; ++i) {
        float* const sums = score + i * layer.kv + at;
        std::fill_n(sums, part, 0.0f);
        for (std::int64_t h = 0; h < layer.heads; ++h) {
          const float* const product = products + (i * layer.heads + h) * part;
          const float factor = weight[i * layer.heads + h];
          // NaN stays NaN.
          for (std::int64_t j = 0; j < part; ++j)
            sums[j] += factor * (product[j] <= 0 ? 0 : product[j]);
        }
        if (!layer.e4m3) continue;
        for (std::int64_t j = 0; j < part; ++j) sums[j] *= scales[j];
      }
    }
    auto* const chosen = static_cast<std::int32_t*>(call.tensors[ids]) + row * layer.top;
    for (std::int64_t i = 0; i < queries; ++i)
      write_best(score + i * layer.kv, layer.visible(first + i, length), chosen + i * layer.top);
  }

  /// The best of the scores that a query sees, in ascending order.
  void write_best(const float* score, std::int64_t visible, std::int32_t* chosen) const {
    std::fill_n(chosen, layer.top, -1);
    if (visible <= layer.top) {
      std::iota(chosen, chosen + visible, 0);
      return;
    }
    std::vector<std::uint32_t> sorted(static_cast<std::size_t>(visible));
    for (std::int64_t j = 0; j < visible; ++j)
      sorted[static_cast<std::size_t>(j)] = key_of(score[j]);
    const auto last = sorted.begin() + (layer.top - 1);
    std::nth_element(sorted.begin(), last, sorted.end(), std::greater<>());
    const std::uint32_t least = *last;
    // Keys equal to the least fill the room that the greater ones leave.
    std::int64_t equal =
        layer.top -
        std::count_if(sorted.begin(), last, [least](std::uint32_t key) { return key > least; });
    for (std::int64_t j = 0; j < visible; ++j) {
      const std::uint32_t key = key_of(score[j]);
      if (key > least || (key == least && equal-- > 0)) *chosen++ = static_cast<std::int32_t>(j);
    }
  }
};

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Host host(problem, facts);
  const std::int64_t queries = config.at("queries"), columns = config.at("keys");
  const std::int64_t parts = quotient_up(host.layer.s, queries);
  return gemm_cpu::worker_program(
      host.count, {.count = config.get("threads"), .floats = host.worker_floats(queries, columns)},
      [tasks = host.layer.b * parts](const HostCall&) { return tasks; },
      [=](const HostCall& call, float* memory, std::int64_t task) {
        const std::int64_t first = task % parts * queries;
        host.choose(call, task / parts, first, std::min(queries, host.layer.s - first), columns,
                    memory);
      });
}

Space space(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  return Space()
      .parameter("queries", "queries of a task", gemm_cpu::up_to(layer.s, {1, 2, 4, 8, 16}))
      .parameter("keys", "keys that it multiplies at a time",
                 gemm_cpu::up_to(layer.kv, {64, 128, 256, 512}))
      .parameter("threads", "threads, each with products of its own", thread_counts(facts));
}

Config default_config(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  const std::int64_t threads = gemm_cpu::worthwhile_threads(
      indexer_op().stages(problem).front().flops, thread_counts(facts));
  const Space space = indexer::space(problem, facts);
  // As many queries as leave each thread a task: each task reads the keys of its sequence.
  std::int64_t queries = 1;
  for (const std::int64_t value : space.parameters()[0].numbers())
    if (layer.b * quotient_up(layer.s, value) >= threads) queries = value;
  std::int64_t keys = 64;
  for (const std::int64_t value : space.parameters()[1].numbers())
    if (value <= 128) keys = value;
  return {{"queries", queries}, {"keys", keys}, {"threads", threads}};
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const std::vector<IndexerFamily> families{
      IndexerFamily({.name = "cpu_indexer",
                     .summary = "queries of a sequence, products by OpenBLAS",
                     .device_kind = DeviceKind::cpu,
                     .sources = {"indexer/cpu_indexer.cpp"},
                     .is_fallback = true,
                     .search = {space, default_config},
                     .program = program})};
  return addresses_of(families);
}

}  // namespace fftune::indexer
