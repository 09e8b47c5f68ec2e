// mla on the CPU: blocks of the rows of a sequence on all threads. Keys come in blocks, whose rows
// are multiplied twice by OpenBLAS, and an online softmax goes from one block to the next.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/blas.hpp"
#include "kernels/common/cpu_task.hpp"
#include "kernels/gemm/cpu/host_gemm.hpp"
#include "kernels/mla/mla.hpp"

namespace fftune::mla {
namespace {

constexpr float lowest = -std::numeric_limits<float>::infinity();

/// The tensors of a call. Buffers of a worker, in floats: q [rows, width], keys [columns, width],
/// scores [rows, columns], values [rows, rank], and the largest score and the sum of each row.
struct Host {
  Layer layer;
  std::size_t q_latent, q_rope, cache, pages, lengths, chosen, out, lse, count;
  gemm_cpu::Converter converter;
  const VectorKernels* vector;

  Host(const Problem& problem, const DeviceFacts& facts)
      : layer(layer_of(problem)),
        converter{&vector_kernels(facts.arch)},
        vector(&vector_kernels(facts.arch)) {
    const TensorPlaces places(mla_op().tensors(problem));
    q_latent = places.at("q_latent"), q_rope = places.at("q_rope"), cache = places.at("cache");
    pages = places.at("pages"), lengths = places.at("lengths"), chosen = places.at("chosen");
    out = places.at("out"), lse = places.at("lse"), count = places.count();
  }

  std::int64_t worker_floats(std::int64_t rows, std::int64_t columns) const {
    return rows * (layer.width() + columns + layer.rank + 2) + columns * layer.width();
  }
  void load(const HostCall& call, std::size_t tensor, std::int64_t first, std::int64_t elements,
            float* to) const {
    const auto* const data = static_cast<const std::byte*>(call.tensors[tensor]);
    converter.load(layer.dtype, data + first * static_cast<std::int64_t>(dtype_bytes(layer.dtype)),
                   to, elements);
  }
  const std::int32_t* integers(const HostCall& call, std::size_t tensor) const {
    return static_cast<const std::int32_t*>(address_of(call, tensor));
  }

  /// The keys that a query's list has, which it sees.
  std::vector<std::int64_t> listed(const HostCall& call, std::int64_t sequence, std::int64_t query,
                                   std::int64_t length) const {
    std::vector<std::int64_t> found;
    for (std::int64_t j = 0; j < layer.top; ++j) {
      const std::int64_t key =
          chosen_key(layer, integers(call, chosen), sequence, query, j, length);
      if (key >= 0) found.push_back(key);
    }
    return found;
  }

  /// Rows [first, first + count) of a sequence, or of a list, as keys, in place where they lie so.
  MatrixView keys(const HostCall& call, std::int64_t sequence,
                  const std::vector<std::int64_t>& list, std::int64_t first, std::int64_t keys,
                  float* room) const {
    const std::int32_t* const table = integers(call, pages);
    if (layer.dtype == DType::f32 && layer.page == 0 && layer.top == 0)
      return {
          static_cast<const float*>(call.tensors[cache]) + place_of(layer, table, sequence, first),
          layer.row};
    for (std::int64_t j = 0; j < keys; ++j) {
      const std::int64_t key =
          layer.top > 0 ? list[static_cast<std::size_t>(first + j)] : first + j;
      const std::int64_t place = place_of(layer, table, sequence, key);
      if (place < 0)
        std::fill_n(room + j * layer.width(), layer.width(), 0.0f);
      else
        load(call, cache, place, layer.width(), room + j * layer.width());
    }
    return {room, layer.width()};
  }

  /// Turns the scores of a row into weights, and rescales its sums to the same reference.
  void add_row(float* scores, std::int64_t width, std::int64_t visible, float* values, float& most,
               float& sum) const {
    std::fill(scores + visible, scores + width, lowest);
    for (std::int64_t j = 0; j < visible; ++j) scores[j] *= layer.scale;
    const float largest = std::max(most, vector->largest(scores, static_cast<std::size_t>(width)));
    if (largest != most) {
      const float factor = std::exp(most - largest);
      sum *= factor;
      for (std::int64_t e = 0; e < layer.rank; ++e) values[e] *= factor;
      most = largest;
    }
    sum += vector->exponentials(scores, most == lowest ? 0 : most, static_cast<std::size_t>(width));
  }

  /// Rows [first, first + rows) of a sequence; with lists, of one query.
  void attend(const HostCall& call, std::int64_t sequence, std::int64_t first, std::int64_t rows,
              std::int64_t columns, float* room) const {
    const std::int64_t width = layer.width(), all = sequence * layer.rows() + first;
    float* const q = room;
    float* const key_room = q + rows * width;
    float* const scores = key_room + columns * width;
    float* const values = scores + rows * columns;
    float* const most = values + rows * layer.rank;
    float* const sum = most + rows;
    for (std::int64_t i = 0; i < rows; ++i) {
      load(call, q_latent, (all + i) * layer.rank, layer.rank, q + i * width);
      if (layer.rope > 0)
        load(call, q_rope, (all + i) * layer.rope, layer.rope, q + i * width + layer.rank);
    }
    std::fill_n(values, rows * layer.rank, 0.0f);
    std::fill_n(most, rows, lowest);
    std::fill_n(sum, rows, 0.0f);
    const std::int64_t length = length_of(layer, integers(call, lengths), sequence);
    const std::vector<std::int64_t> list = listed(call, sequence, first / layer.heads, length);
    const auto sees = [&](std::int64_t row) {
      return layer.top > 0 ? std::ssize(list) : layer.visible(row, length);
    };
    const std::int64_t visible = sees(first + rows - 1);
    for (std::int64_t at = 0; at < visible; at += columns) {
      const std::int64_t part = std::min(columns, visible - at);
      MatrixView k = keys(call, sequence, list, at, part, key_room);
      sgemm(rows, part, width, {q, width}, k, 0, scores, part);
      for (std::int64_t i = 0; i < rows; ++i)
        add_row(scores + i * part, part, std::clamp<std::int64_t>(sees(first + i) - at, 0, part),
                values + i * layer.rank, most[i], sum[i]);
      k.transposed = true;
      sgemm(rows, layer.rank, part, {scores, part}, k, 1, values, layer.rank);
    }
    const auto bytes = static_cast<std::int64_t>(dtype_bytes(layer.dtype));
    for (std::int64_t i = 0; i < rows; ++i) {
      float* const row = values + i * layer.rank;
      const float factor = sum[i] == 0 ? 0 : 1 / sum[i];
      for (std::int64_t e = 0; e < layer.rank; ++e) row[e] *= factor;
      converter.store(layer.dtype, row,
                      static_cast<std::byte*>(call.tensors[out]) + (all + i) * layer.rank * bytes,
                      layer.rank);
      if (!layer.lse) continue;
      const std::int64_t r = first + i, head = sequence * layer.heads + r % layer.heads;
      static_cast<float*>(call.tensors[lse])[head * layer.s + r / layer.heads] =
          sum[i] == 0 ? lowest : most[i] + std::log(sum[i]);
    }
  }
};

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Host host(problem, facts);
  const std::int64_t rows = config.at("rows"), columns = config.at("keys");
  // With lists a task has rows of one query.
  const std::int64_t alike = divided_layer_of(problem).rows();
  const std::int64_t blocks = (alike + rows - 1) / rows, parts = host.layer.rows() / alike * blocks;
  const int threads = config.get("threads");
  return gemm_cpu::worker_program(
      host.count, {.count = threads, .floats = host.worker_floats(rows, columns)},
      [tasks = host.layer.b * parts](const HostCall&) { return tasks; },
      [=](const HostCall& call, float* memory, std::int64_t task) {
        const std::int64_t part = task % parts, begin = part % blocks * rows;
        host.attend(call, task / parts, part / blocks * alike + begin,
                    std::min(rows, alike - begin), columns, memory);
      });
}

Space space(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = divided_layer_of(problem);
  return Space()
      .parameter("rows", "queries times heads of a task",
                 gemm_cpu::up_to(layer.rows(), {4, 8, 16, 32, 64, 128}))
      .parameter("keys", "keys that it sees at a time",
                 gemm_cpu::up_to(layer.kv, {32, 64, 128, 256, 512}))
      .parameter("threads", "threads, each with products of its own", thread_counts(facts));
}

Config default_config(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = divided_layer_of(problem);
  const std::int64_t threads =
      gemm_cpu::worthwhile_threads(mla_op().stages(problem).front().flops, thread_counts(facts));
  // As many rows as leave each thread a task: each task reads the whole cache of its sequence.
  const Space space = mla::space(problem, facts);
  std::int64_t rows = 4;
  for (const std::int64_t value : space.parameters()[0].numbers())
    if (layer.b * ((layer.rows() + value - 1) / value) >= threads) rows = value;
  // A block of keys stays in the L2 cache from one product to the other.
  std::int64_t keys = 32;
  for (const std::int64_t value : space.parameters()[1].numbers())
    if (value <= 128) keys = value;
  return {{"rows", rows}, {"keys", keys}, {"threads", threads}};
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const std::vector<StageFamily> families{
      cpu_fallback({.name = "cpu_mla",
                    .summary = "blocks of rows and keys, products by OpenBLAS",
                    .sources = {"mla/cpu_mla.cpp", vector_kernel_source},
                    .search = {space, default_config},
                    .program = program})};
  return addresses_of(families);
}

}  // namespace fftune::mla
