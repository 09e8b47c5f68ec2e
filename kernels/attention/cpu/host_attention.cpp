#include "kernels/attention/cpu/host_attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/common/cpu_task.hpp"

namespace fftune::attention {
namespace {

constexpr float lowest = -std::numeric_limits<float>::infinity();

const std::int32_t* integers(const HostCall& call, std::size_t tensor) {
  return static_cast<const std::int32_t*>(call.tensors[tensor]);
}

template <typename Element>
const Element* row_of_mask(const HostCall& call, std::size_t tensor, std::int64_t row,
                           std::int64_t width) {
  return static_cast<const Element*>(call.tensors[tensor]) + row * width;
}

}  // namespace

HostAttention::HostAttention(const Problem& problem, const DeviceFacts& facts)
    : layer(layer_of(problem)),
      at(places_of(problem)),
      converter{&vector_kernels(facts.arch)},
      vector(&vector_kernels(facts.arch)) {}

Sequence HostAttention::sequence(const HostCall& call, std::int64_t index) const {
  Sequence sequence{index, index * layer.s, layer.s, index * layer.kv, layer.kv};
  if (layer.layout == Layout::thd) {
    // Memory beyond the existing tokens is not read.
    const auto set = [&](std::size_t tensor, std::int64_t tokens, std::int64_t& first,
                         std::int64_t& count) {
      const auto* const offsets = integers(call, tensor) + index;
      first = std::clamp<std::int64_t>(offsets[0], 0, tokens);
      count = std::clamp<std::int64_t>(offsets[1], first, tokens) - first;
    };
    set(at.offsets, layer.s, sequence.first_query, sequence.queries);
    if (layer.kv_offsets)
      set(at.kv_offsets, layer.kv, sequence.first_key, sequence.keys);
    else
      sequence.first_key = sequence.first_query, sequence.keys = sequence.queries;
  }
  if (layer.lengths)
    sequence.keys = std::clamp<std::int64_t>(integers(call, at.lengths)[index], 0, layer.kv);
  return sequence;
}

std::int64_t HostAttention::query_blocks(const HostCall& call, std::int64_t size) const {
  std::int64_t blocks = 0;
  for (std::int64_t index = 0; index < layer.b; ++index)
    blocks += ceil_div(sequence(call, index).queries, size) * layer.heads;
  return blocks;
}

Block HostAttention::query_block(const HostCall& call, std::int64_t size,
                                 std::int64_t index) const {
  for (std::int64_t i = 0;; ++i) {
    const Sequence sequence = this->sequence(call, i);
    const std::int64_t parts = ceil_div(sequence.queries, size);
    if (index < parts * layer.heads)
      return {sequence, index % layer.heads,
              gemm_cpu::part_of(sequence.queries, parts, parts - 1 - index / layer.heads)};
    index -= parts * layer.heads;
  }
}

std::int64_t HostAttention::key_blocks(const HostCall& call, std::int64_t size) const {
  std::int64_t blocks = 0;
  for (std::int64_t index = 0; index < layer.b; ++index)
    blocks += ceil_div(stored_keys(sequence(call, index)), size) * layer.kv_heads;
  return blocks;
}

Block HostAttention::key_block(const HostCall& call, std::int64_t size, std::int64_t index) const {
  for (std::int64_t i = 0;; ++i) {
    const Sequence sequence = this->sequence(call, i);
    const std::int64_t keys = stored_keys(sequence), parts = ceil_div(keys, size);
    if (index < parts * layer.kv_heads)
      return {sequence, index % layer.kv_heads,
              gemm_cpu::part_of(keys, parts, index / layer.kv_heads)};
    index -= parts * layer.kv_heads;
  }
}

Range HostAttention::keys_of(const Sequence& sequence, std::int64_t query) const {
  const std::int64_t position = query + sequence.keys - sequence.queries;
  Range keys{0, sequence.keys};
  if (layer.mask == Mask::causal) keys.last = std::clamp<std::int64_t>(position + 1, 0, keys.last);
  if (layer.window > 0)
    keys.first = std::clamp<std::int64_t>(position - layer.window + 1, 0, keys.last);
  return keys;
}

Range HostAttention::keys_of(const Sequence& sequence, Range queries) const {
  // Both ends grow with the query.
  return {keys_of(sequence, queries.first).first, keys_of(sequence, queries.last - 1).last};
}

bool HostAttention::sees_any(const HostCall& call, const Sequence& sequence, std::int64_t head,
                             Range queries, Range keys) const {
  const std::int64_t row = layer.mask_row(sequence.index, head);
  if (layer.mask == Mask::boolean) {
    for (std::int64_t i = queries.first; i < queries.last; ++i) {
      const auto* const mask = row_of_mask<std::uint8_t>(call, at.mask, row + i, layer.kv);
      if (std::any_of(mask + keys.first, mask + keys.last, [](auto byte) { return byte != 0; }))
        return true;
    }
    return false;
  }
  if (layer.mask != Mask::packed) return true;
  const std::int64_t across = ceil_div(layer.kv, mask_tile), down = ceil_div(layer.s, mask_tile);
  for (std::int64_t tile = queries.first / mask_tile; tile * mask_tile < queries.last; ++tile) {
    const auto* const flags =
        row_of_mask<std::uint8_t>(call, at.mask_flags, row / layer.s * down + tile, across);
    for (std::int64_t column = keys.first / mask_tile; column * mask_tile < keys.last; ++column)
      if (flags[column] != 0) return true;
  }
  return false;
}

std::int64_t HostAttention::row_of(std::size_t tensor) const {
  if (tensor == at.q) return layer.q_row;
  if (tensor == at.k) return layer.k_row;
  if (tensor == at.v) return layer.v_row;
  return layer.heads * features_of(tensor);
}

MatrixView HostAttention::query_rows(const HostCall& call, std::size_t tensor, const Block& block,
                                     float* room) const {
  const std::int64_t row = row_of(tensor), features = features_of(tensor);
  const std::int64_t first =
      (block.sequence.first_query + block.range.first) * row + block.head * features;
  const auto* const data = static_cast<const std::byte*>(call.tensors[tensor]);
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(layer.dtype));
  if (layer.dtype == DType::f32) return {reinterpret_cast<const float*>(data) + first, row};
  for (std::int64_t i = 0; i < block.range.size(); ++i)
    converter.load(layer.dtype, data + (first + i * row) * bytes, room + i * features, features);
  return {room, features};
}

std::int64_t HostAttention::key_token(const HostCall& call, const Sequence& sequence,
                                      std::int64_t key) const {
  if (layer.page == 0) return sequence.first_key + key;
  const std::int64_t page =
      integers(call, at.pages)[sequence.index * layer.pages_of_sequence() + key / layer.page];
  return page < 0 || page >= layer.pages ? -1 : page * layer.page + key % layer.page;
}

MatrixView HostAttention::key_rows(const HostCall& call, std::size_t tensor,
                                   const Sequence& sequence, std::int64_t head, Range keys,
                                   float* room) const {
  const std::int64_t row = row_of(tensor), features = features_of(tensor);
  const std::int64_t place = head * (tensor == at.v ? layer.v_head : layer.kv_head);
  const auto* const data = static_cast<const std::byte*>(call.tensors[tensor]);
  if (!copies())
    return {reinterpret_cast<const float*>(data) + (sequence.first_key + keys.first) * row + place,
            row};
  const DType dtype = layer.kv_dtype();
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  for (std::int64_t j = 0; j < keys.size(); ++j) {
    const std::int64_t token = key_token(call, sequence, keys.first + j);
    if (token < 0)
      std::fill_n(room + j * features, features, 0.0f);
    else
      converter.load(dtype, data + (token * row + place) * bytes, room + j * features, features);
  }
  if (layer.cache_format.e4m3) {
    const std::size_t scales = tensor == at.v ? at.v_scale : at.k_scale;
    const float scale =
        static_cast<const float*>(call.tensors[scales])[layer.cache_format.scale_at(head)];
    std::for_each(room, room + keys.size() * features, [&](float& value) { value *= scale; });
  }
  return {room, features};
}

void HostAttention::scores(const HostCall& call, const Block& block, Range keys, MatrixView q,
                           MatrixView k, float* scores, float* slope) const {
  const std::int64_t width = keys.size();
  sgemm(block.range.size(), width, layer.dim, q, k, 0, scores, width);
  for (std::int64_t i = 0; i < block.range.size(); ++i)
    finish_row(call, block.sequence, block.head, block.range.first + i, keys, scores + i * width,
               slope == nullptr ? nullptr : slope + i * width);
}

void HostAttention::finish_row(const HostCall& call, const Sequence& sequence, std::int64_t head,
                               std::int64_t query, Range keys, float* scores, float* slope) const {
  const std::int64_t width = keys.size();
  for (std::int64_t j = 0; j < width; ++j) scores[j] *= layer.scale;
  if (layer.softcap > 0)
    for (std::int64_t j = 0; j < width; ++j) {
      const float bounded = std::tanh(scores[j] / layer.softcap);
      scores[j] = bounded * layer.softcap;
      if (slope != nullptr) slope[j] = 1 - bounded * bounded;
    }
  if (layer.bias) {
    const std::int64_t first = layer.bias_at(sequence.index, head) + query * layer.kv + keys.first;
    const auto* const data = static_cast<const std::byte*>(call.tensors[at.bias]);
    const auto bytes = static_cast<std::int64_t>(dtype_bytes(layer.dtype));
    constexpr std::int64_t chunk = 256;
    float bias[chunk];
    for (std::int64_t j = 0; j < width; j += chunk) {
      const std::int64_t part = std::min(chunk, width - j);
      converter.load(layer.dtype, data + (first + j) * bytes, bias, part);
      for (std::int64_t e = 0; e < part; ++e) scores[j + e] += bias[e];
    }
  }
  const std::int64_t row = layer.mask_row(sequence.index, head) + query;
  if (layer.mask == Mask::boolean) {
    const auto* const mask = row_of_mask<std::uint8_t>(call, at.mask, row, layer.kv) + keys.first;
    for (std::int64_t j = 0; j < width; ++j)
      if (mask[j] == 0) scores[j] = lowest;
  } else if (layer.mask == Mask::packed) {
    const auto* const bits =
        row_of_mask<std::uint32_t>(call, at.mask_bits, row, mask_words(layer.kv));
    for (std::int64_t j = 0; j < width; ++j) {
      const std::int64_t key = keys.first + j;
      if ((bits[key / 32] >> (key % 32) & 1) == 0) scores[j] = lowest;
    }
  }
  const Range seen = keys_of(sequence, query);
  const std::int64_t begin = std::clamp<std::int64_t>(seen.first - keys.first, 0, width);
  const std::int64_t end = std::clamp<std::int64_t>(seen.last - keys.first, 0, width);
  std::fill(scores, scores + begin, lowest);
  std::fill(scores + std::max(begin, end), scores + width, lowest);
}

void HostAttention::store_rows(const HostCall& call, std::size_t tensor, std::int64_t heads,
                               std::int64_t first_token, std::int64_t head, std::int64_t count,
                               const float* rows) const {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(layer.dtype));
  const std::int64_t features = features_of(tensor);
  auto* const data = static_cast<std::byte*>(call.tensors[tensor]);
  for (std::int64_t i = 0; i < count; ++i)
    converter.store(layer.dtype, rows + i * features,
                    data + (((first_token + i) * heads + head) * features) * bytes, features);
}

float HostAttention::sink(const HostCall& call, std::int64_t head) const {
  return layer.sinks ? static_cast<const float*>(call.tensors[at.sinks])[head] : lowest;
}

std::vector<std::string> host_sources(const char* own) {
  return {own, "attention/cpu/host_attention.cpp", "attention/cpu/host_attention.hpp",
          activation_source, vector_kernel_source};
}

Space block_space(const Layer& layer, const DeviceFacts& facts) {
  return Space()
      .parameter("block_q", "queries of a block", gemm_cpu::up_to(layer.s, {16, 32, 64, 128, 256}))
      .parameter("block_k", "keys that it sees at a time",
                 gemm_cpu::up_to(layer.kv, {64, 128, 256, 512, 1024}))
      .parameter("threads", "threads, each with products of its own", thread_counts(facts));
}

std::int64_t default_threads(const Layer& layer, const DeviceFacts& facts) {
  const bool shared = layer.layout == Layout::thd && layer.page == 0;  // kv is of all sequences
  const std::int64_t keys = shared ? ceil_div(layer.kv, layer.b) : layer.kv;
  const double products = (layer.backward ? 10 : 4) * static_cast<double>(layer.q_tokens()) *
                          static_cast<double>(layer.heads * layer.dim) * static_cast<double>(keys);
  return gemm_cpu::worthwhile_threads(products, thread_counts(facts));
}

Config default_blocks(const Layer& layer, const DeviceFacts& facts) {
  // Large products, whose scores stay in the L2 cache, and blocks for every thread.
  const std::int64_t threads = default_threads(layer, facts);
  const std::int64_t queries = layer.layout == Layout::thd ? layer.s / layer.b : layer.s;
  const Space space = block_space(layer, facts);
  std::int64_t rows = 16;
  for (const std::int64_t value : space.parameters()[0].numbers())
    if (value <= 128 && layer.b * layer.heads * ceil_div(queries, value) >= 2 * threads)
      rows = value;
  std::int64_t columns = 64;
  for (const std::int64_t value : space.parameters()[1].numbers())
    if (value * rows <= 65536 && value <= 512) columns = value;
  return {{"block_q", rows}, {"block_k", columns}, {"threads", threads}};
}

}  // namespace fftune::attention
